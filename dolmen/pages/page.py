"""The frame of every page that dolmen writes, an HTML template with the shared style sheet
(style.css), and pictures as SVG: shapes, axes and the fills that distinguish kinds, also in black
and white. Lengths are pixels of a page 920 wide; CSS classes are styled in report.html.
"""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from dolmen import __version__
from dolmen.files import gate

STYLE = Path(__file__).with_name("style.css")


def house_style() -> str:
    """Return the text of style.css, the CSS that every page has in its head before rules of its
    own.
    """
    return gate.read_text(STYLE, gate.MIB)


def fill(frame: Path, page_style: str = "", **parts: str) -> str:
    """Return an HTML page: the text of the template file `frame`, with $NAME replaced by the HTML
    parts[NAME], $style by the shared CSS followed by `page_style`, and $version by that of dolmen.
    Raises KeyError for a $NAME without a part.
    """
    # $names: CSS is full of braces
    template = Template(gate.read_text(frame, gate.MIB))
    return template.substitute(style=house_style() + page_style, version=__version__, **parts)


def figure(name: str | int, content: object, caption: str) -> str:
    """Return an HTML <figure> with the id figure-`name`, the content and, below it, the caption.
    `content`, `caption`: HTML, not escaped.
    """
    return f'<figure id="figure-{name}">\n{content}\n<figcaption>{caption}</figcaption>\n</figure>'


WIDTH = 920.0

# name -> (colour, hatching: its path in a square of 8, or nothing)
FILLS: dict[str, tuple[str, str]] = {
    "product": ("#7fa9d6", ""),
    "attention": ("#a9c5e6", "M0 8L8 0"),
    "memory-bound": ("#d3e1f2", "M0 0L8 8"),
    "host": ("#e6e2d8", "M4 0V8"),
    "tp": ("#e58f7b", "M0 4H8"),
    "cp": ("#f0b9a9", "M0 8L8 0M0 0L8 8"),
    "ep": ("#f6d9c6", "M2 2h2v2h-2z"),
    "dp": ("#eeb06d", "M0 8L8 0M-2 2L2 -2M6 10L10 6"),
    "pp": ("#c9b3d9", "M0 2H8M0 6H8"),
    "bubble": ("#f6f5f1", "M0 8L8 0"),
    "optimizer": ("#93bf8c", "M4 0V8M0 4H8"),
    "parameter": ("#7fa9d6", ""),
    "compute": ("#a9c5e6", "M0 8L8 0"),
    "gradient": ("#eeb06d", "M0 4H8"),
    "unsharded": ("#f5d3ae", "M0 2H8M0 6H8"),
    "activation": ("#e58f7b", "M0 0L8 8"),
    "buffer": ("#c9b3d9", "M4 0V8"),
    "other": ("#e6e2d8", "M0 8L8 0M0 0L8 8"),
    "F": ("#a9cbea", ""),
    "B": ("#eeb06d", "M0 8L8 0"),
    "I": ("#e58f7b", "M0 8L8 0"),
    "W": ("#5f9457", "M0 4H8"),
    "idle": ("#f6f5f1", "M2 2h1v1h-1z"),
    "link": ("#d3e1f2", ""),
}


def patterns() -> str:
    """Return a hidden <svg> element that defines every fill of FILLS (a colour with hatching) as an
    SVG pattern. A page needs it once; its shapes refer to a pattern as fill="url(#f-NAME)".
    """
    definitions = (
        f'<pattern id="f-{name}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{colour}"/><path d="{path}" class="hatch"/></pattern>'
        for name, (colour, path) in FILLS.items()
    )
    return f'<svg width="0" height="0" class="defs"><defs>{"".join(definitions)}</defs></svg>'


class Drawing:
    """One picture; `str` of it is its SVG. `title` is read by screen readers."""

    def __init__(self, title: str, height: float, width: float = WIDTH):
        """Start an empty picture. `height`, `width`: in pixels."""
        self.title, self.width, self.height = title, width, height
        self.parts: list[str] = []

    def __str__(self) -> str:
        """Return the picture as an SVG element."""
        body = "\n".join(self.parts)
        size = f"0 0 {number(self.width)} {number(self.height)}"
        return (
            f'<svg viewBox="{size}" role="img" aria-label="{escape(self.title)}">\n{body}\n</svg>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Add text to the picture at (x, y), in pixels. `kind`: its CSS class. `anchor`: which
        point of the text is at x: start, middle or end.
        """
        self.parts.append(
            f'<text x="{number(x)}" y="{number(y)}" class="{kind}" text-anchor="{anchor}">'
            f"{escape(words)}</text>"
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, hint: str = ""
    ) -> None:
        """Add a box to the picture, with its upper left corner at (x, y). `fill`: a name of FILLS;
        `hint`: tooltip, if not empty. A negative width becomes 0.
        """
        title = f"<title>{escape(hint)}</title>" if hint else ""
        self.parts.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(max(0.0, width))}" '
            f'height="{number(height)}" fill="url(#f-{fill})" class="box">{title}</rect>'
        )

    def line(self, points: Sequence[tuple[float, float]], kind: str = "line") -> None:
        """Add a line through the (x, y) points to the picture; nothing without points. `kind`: its
        CSS class.
        """
        if points:
            path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
            self.parts.append(f'<path d="{path}" class="{kind}"/>')

    def dot(self, x: float, y: float, hint: str = "", kind: str = "dot") -> None:
        """Add a dot of radius 3.6 to the picture. `hint`: its tooltip; `kind`: its CSS class."""
        self.parts.append(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="3.6" class="{kind}">'
            f"<title>{escape(hint)}</title></circle>"
        )

    def boxes(
        self, each: Sequence[tuple[float, float]], y: float, height: float, fill: str
    ) -> None:
        """Add boxes of one fill and height to the picture, with their upper edges at `y`, as a
        single SVG path without tooltips. `each`: (x of the left edge, width) of every box; `fill`:
        a name of FILLS. Nothing without boxes.
        """
        tall = number(height)
        # thousands of rect elements would make a page slow
        path = "".join(
            f"M{number(x)} {number(y)}h{number(w)}v{tall}h-{number(w)}z" for x, w in each
        )
        if path:
            self.parts.append(f'<path d="{path}" fill="url(#f-{fill})" class="thin"/>')

    def legend(self, names: dict[str, str], y: float, x: float = 0) -> None:
        """Add a legend to the picture: a row of small boxes, each followed by its text. `names`:
        fill -> text; `y`: base line of the texts; `x`: left edge of the first box.
        """
        for fill, words in names.items():
            self.box(x, y - 10, 16, 12, fill)
            self.text(x + 21, y, words, "small")
            # 6.4 pixels are the mean width of a character
            x += 34 + 6.4 * len(words)


class Scale:
    """Maps numbers to pixels, linearly or, with `log`, logarithmically."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False):
        """Map the number `low` to pixel `start` and `high` to pixel `end`; with `log`, on a
        logarithmic scale, for which `low` must be above 0.
        """
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        """Return the pixel of a value, which may lie outside of the scale; with `log`, values below
        `low` count as `low`. If `low` equals `high`, every value is in the middle.
        """
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, low))
        # a single value is in the middle
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return where ticks of an axis are: about five multiples of 1, 2 or 5 times a power of ten
        between `low` and `high`; with `log`, at most seven of these numbers themselves.
        """
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            # evenly spaced on a logarithmic scale, almost
            candidates = [m * 10.0**p for p in powers for m in (1, 2, 5)]
            ticks = [tick for tick in candidates if self.low <= tick <= self.high]
            return ticks if len(ticks) <= 7 else ticks[:: math.ceil(len(ticks) / 7)]
        step = round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step)
        return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def round_step(about: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is no less than `about`."""
    power = 10.0 ** math.floor(math.log10(about)) if about > 0 else 1.0
    return next(power * m for m in (1, 2, 5, 10) if power * m >= about * (1 - 1e-9))


def axis(drawing: Drawing, scale: Scale, y: float, words: str, top: float = 0) -> None:
    """Draw a horizontal axis: for each tick of `scale` a vertical grid line from `top` down to `y`
    and its number below, and the title `words` below those.
    """
    for tick in scale.ticks():
        drawing.line([(scale(tick), top), (scale(tick), y)], "grid")
        drawing.text(scale(tick), y + 14, short(tick), "small", "middle")
    drawing.text((scale.start + scale.end) / 2, y + 31, words, "label", "middle")


def side(drawing: Drawing, scale: Scale, x: float, words: str, right: float) -> None:
    """Draw a vertical axis: for each tick of `scale` a horizontal grid line from `x` to `right` and
    its number left of it, and the title `words` above.
    """
    for tick in scale.ticks():
        drawing.line([(x, scale(tick)), (right, scale(tick))], "grid")
        drawing.text(x - 6, scale(tick) + 4, short(tick), "small", "end")
    drawing.text(x, scale.end - 9, words, "label")


def number(value: float) -> str:
    """Return a coordinate as text with at most one decimal. Raises ValueError for NaN and infinity:
    a picture with them shows nothing.
    """
    if not math.isfinite(value):
        raise ValueError(f"{value} has no place in a picture")
    return f"{value:.1f}".rstrip("0").rstrip(".")


def short(value: float) -> str:
    """Return a number as text with three significant digits and k, M, B or T for powers of 1000:
    12.5k.
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
