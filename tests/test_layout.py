"""The import directions of the code, as a test.

serve -> engine -> sched -> core decides; engine -> device -> spec -> models -> layers -> parallel
-> ops does. The two columns meet in `engine` and share only the plan and the orders.
"""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "merestone"
DEVICE_SIDE = ["ops", "parallel", "layers", "models", "spec", "device"]
STORE = {f"merestone.store.{name}" for name in ("lane", "manifest", "slabs", "tier")}
SHARED = STORE | {"merestone.sched.plan", "merestone.core.orders", "merestone.core.geometry"}
MAY_IMPORT = {
    "core": {"core"},
    "sched": {"sched", "core"},
    **{room: set(DEVICE_SIDE[: i + 1]) for i, room in enumerate(DEVICE_SIDE)},
    "engine": {"engine", "sched", "core", "store", "device", "spec", "models", "parallel"},
    "store": {"store", "core", "sched"},
    "serve": {"serve", "engine", "probe"},
    "probe": {"probe"},
}
# The text side builds its default model with `models.tiny`; sampling parameters live in the plan.
EXTRA = {
    "serve": {"merestone.models.tiny", "merestone.models.loader", "merestone.sched.plan"},
    "engine": {"merestone.parallel.world"},
}
NO_TORCH = ("core", "sched", "store", "serve", "probe")


def imports(path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.module or "", node.lineno))
    return found


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_import_directions(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0]
    if room not in MAY_IMPORT:
        assert room in {"__init__.py", "__main__.py"}, f"unknown room {room}"
        return
    for module, line in imports(path):
        if room in NO_TORCH:
            assert module.split(".")[0] != "torch", f"{path}:{line}: torch in {room}"
        if not module.startswith("merestone."):
            continue
        target = module.split(".")[1]
        allowed = (
            target in MAY_IMPORT[room]
            or module in EXTRA.get(room, set())
            or (room in DEVICE_SIDE and module in SHARED)
        )
        assert allowed, f"{path.relative_to(SOURCE)}:{line}: {room} must not import {module}"


def test_no_lazy_imports() -> None:
    """A function-level import of our own code is a layout bug in disguise."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.ImportFrom) and inner.module:
                        assert not inner.module.startswith("merestone"), (
                            f"{path}:{inner.lineno}: import inside a function"
                        )


def test_sizes() -> None:
    """A reader should be able to read everything: no file above 400 lines."""
    lengths = {path: len(path.read_text().splitlines()) for path in FILES}
    long = {str(p.relative_to(SOURCE)): n for p, n in lengths.items() if n > 400}
    assert not long, long


def test_every_test_file_has_a_name_of_its_own() -> None:
    """pytest imports them by their names alone."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})
