"""Products of linear layers by oneDNN are as exact as torch's, and no layer is left out."""

import pytest
import torch
from support.small_models import ids, save_model
from torch.nn import functional as F  # noqa: N812

import quanterr
from quanterr.evaluation.running import linear
from quanterr.tensors import products

K = 192


@pytest.fixture
def onednn(monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: True)


def make_linear(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "x",
    [
        pytest.param(make_linear(32, K), id="rows"),
        pytest.param(make_linear(2, 9, K), id="chunks"),
        pytest.param(make_linear(2, 9, K)[:, 4:], id="ends of chunks"),
        pytest.param(make_linear(K), id="a vector"),
        pytest.param(make_linear(0, K), id="none"),
        pytest.param(make_linear(K, 32).t(), id="transposed"),
        pytest.param(make_linear(8, 2 * K)[:, ::2], id="every other column"),
    ],
)
@pytest.mark.parametrize(
    "weight",
    [make_linear(40, K), make_linear(K, 40).t(), make_linear(80, K)[8:48], make_linear(40, 1).expand(40, K)],
    ids=["plain", "transposed", "a part", "one value a row"],
)
def test_products_are_as_exact_as_float32(onednn, x, weight, with_bias):
    """In any order, a sum of K products and a bias is off by at most (K + 1) 2^-24 Σ |x w|, plus second-order terms."""
    bias = make_linear(40) if with_bias else None
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    of_sizes = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    product = products.multiply(x, weight, bias)

    assert (want.shape, torch.float32) == (product.shape, product.dtype)
    assert bool(((product - want).abs() <= (K + 2) * 2.0**-24 * of_sizes).all())


def test_column_slices_are_left_to_torch(monkeypatch):
    """oneDNN computes them without vector instructions."""
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: pytest.fail("oneDNN"))
    x, weight = make_linear(8, K), make_linear(40, 2 * K)[:, :K]

    assert torch.equal(F.linear(x, weight), products.multiply(x, weight))


def test_gradients_equal_torch(onednn):
    x, weight = make_linear(8, K).requires_grad_(), make_linear(40, K)
    gradient, want = (torch.autograd.grad(of(x, weight).square().sum(), x)[0] for of in (products.multiply, F.linear))

    assert torch.equal(want, gradient)


@pytest.mark.parametrize(("dtype", "times"), [("float32", 1), ("float64", 0)])
def test_all_linear_layers_on_both_sides_use_onednn(dtype, times, tmp_path, monkeypatch):
    """A Llama has seven linear layers in each block, and its head; those of a float64 model are left alone.

    Products for output errors, which oneDNN does not compute on every CPU, have inputs without an axis for chunks.
    """
    pytest.importorskip("transformers", reason='transformers is not installed (pip install "quanterr[evaluate]")')
    original, computed = save_model("llama", tmp_path / "original"), []
    monkeypatch.setattr(linear, "multiply", lambda *args: computed.append(args[0].dim()) or F.linear(*args))
    evaluation = quanterr.evaluate(
        original, against="int8_row", tokens=ids(tmp_path), context=32, batch=99, dtype=dtype
    )
    blocks = sum(".layers." in block.name for block in evaluation.candidates[0].blocks)

    assert times * 2 * (7 * blocks + 1) == computed.count(3)
