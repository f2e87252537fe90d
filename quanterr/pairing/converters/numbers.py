"""Changes of numbers that converters make, from the original to what is stored; ``apply`` may change its argument."""

from collections.abc import Callable
from typing import NamedTuple

from quanterr.errors import FormatMismatch
from quanterr.lazy_torch import Tensor, torch
from quanterr.util.strict_json import JsonFields


class Added(NamedTuple):
    """A number is added, for example to norms that one program stores around 0 and another around 1."""

    number: float

    @property
    def text(self) -> str:
        """The change in words."""
        return "plus one" if self.number == 1 else f"plus {self.number:g}"

    def apply(self, x: Tensor) -> Tensor:
        """Return what is stored of the original's elements."""
        return x.add_(self.number)

    def undo(self, x: Tensor) -> Tensor:
        """Return the original's elements."""
        return x - self.number


class NegatedExponential(NamedTuple):
    """-exp of each element, as Mamba computes A from the trained A_log."""

    text: str = "-exp of the original"

    def apply(self, x: Tensor) -> Tensor:
        """Return what is stored of the original's elements."""
        return x.exp_().neg_()

    def undo(self, x: Tensor) -> Tensor:
        """Return the original's elements."""
        return (-x).log()


class Exponential(NamedTuple):
    """exp of each element."""

    text: str = "exp of the original"

    def apply(self, x: Tensor) -> Tensor:
        """Return what is stored of the original's elements."""
        return x.exp_()

    def undo(self, x: Tensor) -> Tensor:
        """Return the original's elements."""
        return x.log()


class SoftPlus(NamedTuple):
    """log(1 + exp) of each element."""

    text: str = "log(1 + exp) of the original"

    def apply(self, x: Tensor) -> Tensor:
        """Return what is stored of the original's elements."""
        return torch.nn.functional.softplus(x)

    def undo(self, x: Tensor) -> Tensor:
        """Return the original's elements."""
        return x + (-(-x).expm1()).log()  # exp(x) overflows


class Multiplied(NamedTuple):
    """Rows are multiplied by numbers of the configuration: (rows, factor) from top to bottom; None means all others."""

    factors: tuple[tuple[int | None, float], ...]
    source: str

    @property
    def text(self) -> str:
        """The change in words."""
        return f"times {self.source}"


class Undone(NamedTuple):
    """The reverse of a change, from what is stored to the original."""

    change: Added | NegatedExponential | Exponential | SoftPlus

    @property
    def text(self) -> str:
        """The change in words."""
        return f"undone: {self.change.text}"

    def apply(self, x: Tensor) -> Tensor:
        """Return the original's elements."""
        return self.change.undo(x)

    def undo(self, x: Tensor) -> Tensor:
        """Return what is stored."""
        return self.change.apply(x.clone())


ElementChange = Added | NegatedExponential | Exponential | SoftPlus | Undone
Change = ElementChange | Multiplied


def always(change: Change) -> Callable[[JsonFields], Change | None]:
    """Return a function that returns a change that does not depend on the configuration."""
    return lambda _config: change


def multiply(*keys: tuple[str, int | None]) -> Callable[[JsonFields], Change | None]:
    """Return a function that finds the product of numbers of a configuration, each as (key, index in a list).

    That function raises FormatMismatch if there is no configuration, or if one of its values is no number.
    """
    named = " and ".join(key for key, _ in keys)

    def find(config: JsonFields) -> Change | None:
        product = 1.0
        for key, index in keys:
            factor = config.get(key, 1.0)
            factor = factor[index] if index is not None and isinstance(factor, list) and index < len(factor) else factor
            if not config or not isinstance(factor, int | float):
                raise _make_mismatch(named)
            product *= factor
        return None if product == 1.0 else Multiplied(((None, product),), named)

    return find


def multiply_mamba_inputs(config: JsonFields) -> Change:
    """Return the factors of Falcon-H1's Mamba inputs: of the gate, x, B, C and the time steps, from top to bottom.

    Raises:
        FormatMismatch: the configuration does not have them.
    """
    source = "ssm_in_multiplier and ssm_multipliers"
    factors, overall = config.get("ssm_multipliers"), config.get("ssm_in_multiplier", 1.0)
    inner, groups, state = (config.get(key) for key in ("mamba_d_ssm", "mamba_n_groups", "mamba_d_state"))
    if not (isinstance(factors, list) and len(factors) == 5 and isinstance(overall, int | float)):
        raise _make_mismatch(source)
    if not (isinstance(inner, int) and isinstance(groups, int) and isinstance(state, int)):
        raise _make_mismatch("mamba_d_ssm, mamba_n_groups and mamba_d_state")
    rows = (inner, inner, groups * state, groups * state, None)
    products = (overall * factor for factor in factors)
    return Multiplied(tuple(zip(rows, products, strict=True)), source)


def _make_mismatch(keys: str) -> FormatMismatch:
    return FormatMismatch(
        f"its converter multiplied it by {keys} of config.json, and no config.json has numbers there: put the "
        "original's config.json next to its weights"
    )
