"""The measurements of a group of layers, which can be merged with those of other groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quanterr.metrics import LayerValues, Measurement
from quanterr.metrics.attainable import PooledSamples
from quanterr.metrics.scores import compute_scores
from quanterr.metrics.sums import Sums

if TYPE_CHECKING:
    from collections.abc import Mapping

    from msgspec import Struct

    from quanterr.metrics.histogram import Histogram


class GroupMeasurement:
    """The sums and values of a group of layers, without histograms, of which the kernel adds many at once."""

    def __init__(self) -> None:
        """Start without layers."""
        self.layers = 0
        self.whole = Measurement(Sums())
        self._values, self._samples = LayerValues(), PooledSamples()

    def add(self, measurement: Measurement, values: Mapping[str, float | None]) -> None:
        """Add a layer; ``values`` are as for :meth:`LayerValues.add`."""
        self._add(1, measurement)
        self._samples.add(measurement.sums, measurement.attainable)
        self._values.add(values)

    def merge(self, other: GroupMeasurement) -> None:
        """Add the layers of another group."""
        self._add(other.layers, other.whole)
        self._samples.merge(other._samples)
        self._values.extend(other._values)

    def _add(self, layers: int, sides: Measurement) -> None:
        self.layers += layers
        self.whole.sums.merge_other_weight(sides.sums)
        self.whole.stored_bits += sides.stored_bits
        self.whole.original_bits += sides.original_bits

    def sort(self) -> None:
        """Sort the values of single layers, so that statistics over groups that merge them sort them quickly."""
        self._values.sort()

    def compute_scores(
        self, fields_of: type[Struct], histogram: Histogram | None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Compute the fields of a class as :func:`compute_scores`; ``histogram`` is that of all layers."""
        self.whole.sums.histogram = histogram
        self.whole.attainable, self.whole.layers = self._samples.whole(), self._values
        return compute_scores(fields_of, self.whole)
