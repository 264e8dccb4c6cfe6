"""The figures of one demo, as rows of a table. No JAX here."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """The figures of one demo: losses in bits per byte, sizes in bytes, SQNR in dB.

    Attributes:
      wide, quantized: Means of the last five evaluations of the two trained models.
      wide_final, converted: Loss of the float32 model's final weights, before and after conversion.
      step_seconds: Median step, of the float32 model and of the quantized one.
      sizes: Of the two checkpoints.
      sqnr_db: Mean over the converted weights.
      format, gradient: Names of the formats of the forward products and of the cotangents.
    """

    wide: float
    quantized: float
    wide_final: float
    converted: float
    step_seconds: tuple[float, float]
    sizes: tuple[int, int]
    sqnr_db: float
    format: str
    gradient: str

    def rows(self) -> list[tuple[str, str]]:
        """What is measured, and the figure, as they are printed."""
        wide_ms, quantized_ms = (1e3 * seconds for seconds in self.step_seconds)
        wide_size, size = self.sizes
        return [
            ("float32, last five evaluations", _loss(self.wide)),
            (
                f"trained in {self.format} / {self.gradient}, last five",
                f"{_loss(self.quantized)} ({self.quantized / self.wide - 1:+.2%})",
            ),
            ("float32, final weights", _loss(self.wide_final)),
            (
                f"the same, converted to {self.format}",
                f"{_loss(self.converted)} ({self.converted / self.wide_final - 1:+.2%})",
            ),
            (
                "step, float32 and quantized",
                f"{wide_ms:.1f} and {quantized_ms:.1f} ms (ratio {quantized_ms / wide_ms:.2f})",
            ),
            (
                f"checkpoint, float32 and {self.format}",
                f"{wide_size:,} and {size:,} bytes (ratio {size / wide_size:.2f})",
            ),
            ("mean SQNR of the converted weights", f"{self.sqnr_db:.1f} dB"),
        ]

    def markdown(self, caption: str) -> str:
        """The table as Markdown, with a line of text under it."""
        lines = ["| measured | figure |", "| --- | --- |"]
        lines += [f"| {name} | {figure} |" for name, figure in self.rows()]
        return "\n".join([*lines, "", caption, ""])


def _loss(bits_per_byte: float) -> str:
    return f"{bits_per_byte:.4f} bits/byte"
