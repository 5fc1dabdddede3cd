import pytest
import torch

from merestone.layers.weights import WeightError, Weights


def reader() -> Weights:
    return Weights({"a": torch.ones(2, 3), "b": torch.ones(4, 3)}, torch.bfloat16)


def test_takes_in_the_models_dtype_or_in_fp32() -> None:
    weights = reader()
    assert weights.take("a", (2, 3)).dtype == torch.bfloat16
    assert weights.fp32("b", (4, 3)).dtype == torch.float32
    weights.finish()


def test_stacks_in_order() -> None:
    weights = Weights({"a": torch.zeros(1, 3), "b": torch.ones(2, 3)}, torch.float32)
    assert weights.stack(("b", "a"), (2, 1), 3)[:, 0].tolist() == [1, 1, 0]


def test_missing_and_taken_twice() -> None:
    weights = reader()
    weights.take("a", (2, 3))
    for name in ("a", "c"):
        with pytest.raises(WeightError, match=f"weight {name} is missing"):
            weights.take(name, (2, 3))


def test_wrong_shape_names_both() -> None:
    with pytest.raises(WeightError, match=r"weight a has shape \(2, 3\), expected \(3, 2\)"):
        reader().take("a", (3, 2))


def test_leftovers_are_named() -> None:
    weights = reader()
    weights.take("a", (2, 3))
    with pytest.raises(WeightError, match="unknown to the model: b"):
        weights.finish()


def test_misaligned_memory_is_copied() -> None:
    stored = torch.ones(7)[1:].view(2, 3)
    taken = Weights({"a": stored}, torch.float32).take("a", (2, 3))
    assert taken.data_ptr() % 64 == 0
    assert torch.equal(taken, stored)
