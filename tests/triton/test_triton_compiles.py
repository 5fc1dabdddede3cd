"""Every kernel compiles for a Hopper GPU, with its shared memory in bounds: checked without one.

In a process of its own, because here Triton may be an interpreter.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_every_kernel_compiles_for_hopper() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # Packages may have come by a path of this process's own.
    places = [str(HERE.parent.parent / "src"), str(HERE), *filter(None, sys.path)]
    environment["PYTHONPATH"] = os.pathsep.join(places)
    done = subprocess.run(
        [sys.executable, str(HERE / "aot.py")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
