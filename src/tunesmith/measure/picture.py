"""Memory over a training step, what quantizing costs by layer, and loss by learning rate, drawn as SVGs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tunesmith.measure.trace import CATEGORIES, MemoryPicture

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#c44e52", "#937860")


def memory_svg(memory: MemoryPicture) -> str:
    """Memory by category over the step, stacked."""
    width, height, left, top = 860, 360, 70, 40
    length = memory.seconds[-1] or 1.0
    highest = max(1, memory.peak_bytes) * 1.05
    unit, name = next((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")) if highest > u)

    def x(second: float) -> str:
        return f"{left + second / length * width:.1f}"

    def y(size: float) -> str:
        return f"{top + height - size / highest * height:.1f}"

    text = 'font-family="sans-serif" font-size="12" fill="#222"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 150} {top + height + 50}">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{left}" y="22" {text}>Memory over one step; peak {memory.peak_bytes / unit:.2f} {name}</text>',
    ]
    below = [0] * len(memory.seconds)
    for category, colour in zip(CATEGORIES, COLOURS, strict=True):
        above = [low + size for low, size in zip(below, memory.bytes[category], strict=True)]
        edge = _steps(memory.seconds, above) + _steps(memory.seconds, below)[::-1]
        points = " ".join(f"{x(second)},{y(size)}" for second, size in edge)
        parts.append(f'<polygon points="{points}" fill="{colour}"><title>{category}</title></polygon>')
        below = above
    for index, (category, colour) in enumerate(reversed(list(zip(CATEGORIES, COLOURS, strict=True)))):
        row = top + 10 + 20 * index
        size = memory.at_peak[category] / unit
        parts.append(f'<rect x="{left + width + 8}" y="{row}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + width + 25}" y="{row + 11}" {text}>{category} {size:.2f}</text>')
    for tick in range(5):
        size = highest * tick / 4
        parts.append(f'<text x="{left - 6}" y="{y(size)}" text-anchor="end" {text}>{size / unit:.1f} {name}</text>')
        second = length * tick / 4
        place = f'x="{x(second)}" y="{top + height + 18}" text-anchor="middle"'
        parts.append(f"<text {place} {text}>{second * 1e3:.0f} ms</text>")
    parts.append(f'<text x="{left + width + 8}" y="{top + 150}" {text}>in {name}, at the peak</text>')
    return "\n".join([*parts, "</svg>", ""])


def _steps(seconds: list[float], sizes: list[int]) -> list[tuple[float, int]]:
    """The corners of a staircase: a size holds until the next."""
    corners = []
    for index, (second, size) in enumerate(zip(seconds, sizes, strict=True)):
        if index:
            corners.append((second, sizes[index - 1]))
        corners.append((second, size))
    return corners


def layers_svg(title: str, layers: Sequence[tuple[str, float, float]]) -> str:
    """What quantizing costs by layer, as bars: the error of what it adds, and the growth of perplexity by it alone."""
    left, top, wide, high = 70, 40, max(420, 26 * len(layers)), 150
    text = 'font-family="sans-serif" font-size="12" fill="#222"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + wide + 20} {top + 2 * high + 110}">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{left}" y="18" {text}>Quantized by layer: {title}</text>',
    ]
    for index, name in ((1, "error of the layer's output"), (2, "growth of perplexity, this layer alone")):
        base = top + index * high + (index - 1) * 50
        largest = max([1e-9, *(abs(layer[index]) for layer in layers)])
        parts.append(f'<text x="{left}" y="{base - high + 4}" {text}>{name}, at most {largest:.2%}</text>')
        parts.append(f'<line x1="{left}" x2="{left + wide}" y1="{base}" y2="{base}" stroke="#222"/>')
        for number, layer in enumerate(layers):
            x, step = left + number * wide / len(layers), wide / len(layers)
            size = abs(layer[index]) / largest * (high - 30)
            colour = COLOURS[0] if layer[index] >= 0 else COLOURS[2]
            bar = f'x="{x + 2:.1f}" y="{base - size:.1f}" width="{max(1.0, step - 4):.1f}" height="{size:.1f}"'
            parts.append(f'<rect {bar} fill="{colour}"><title>{layer[0]}: {layer[index]:+.3%}</title></rect>')
            middle = f'x="{x + step / 2:.1f}" y="{base + 15}" text-anchor="middle"'
            parts.append(f"<text {middle} {text}>{layer[0]}</text>")
    return "\n".join([*parts, "</svg>", ""])


def rates_svg(points: Sequence[tuple[float, float, float]], marks: Mapping[str, float]) -> str:
    """Loss by learning rate, single steps and their moving average; rates that are marked, by name."""
    width, height, left, top = 760, 320, 70, 40
    shown = [rate for rate, _, _ in points]
    low, high = math.log10(min(shown)), math.log10(max(shown))
    smoothed = [value for _, _, value in points]
    least = min(smoothed) - 0.1 * (max(smoothed) - min(smoothed) or 1)
    most = max(smoothed) + 0.1 * (max(smoothed) - min(smoothed) or 1)

    def x(rate: float) -> str:
        return f"{left + (math.log10(rate) - low) / (high - low or 1) * width:.1f}"

    def y(loss: float) -> str:
        return f"{top + height - (min(most, max(least, loss)) - least) / (most - least) * height:.1f}"

    text = 'font-family="sans-serif" font-size="12" fill="#222"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 30} {top + height + 50}">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{left}" y="18" {text}>Loss by learning rate: steps, and their moving average</text>',
    ]
    for rate, loss, _ in points:
        parts.append(f'<circle cx="{x(rate)}" cy="{y(loss)}" r="2.5" fill="{COLOURS[0]}" fill-opacity="0.4"/>')
    line = " ".join(f"{x(rate)},{y(value)}" for rate, _, value in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[0]}" stroke-width="2"/>')
    for index, (name, rate) in enumerate(marks.items()):
        if not min(shown) <= rate <= max(shown):
            continue
        colour, place = COLOURS[1 + index % 5], f'x1="{x(rate)}" x2="{x(rate)}" y1="{top}" y2="{top + height}"'
        parts.append(f'<line {place} stroke="{colour}" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x(rate)}" y="{top + 12 + 15 * index}" dx="4" {text}>{name} {rate:.2g}</text>')
    for tick in range(5):
        loss, rate = least + (most - least) * tick / 4, 10 ** (low + (high - low) * tick / 4)
        parts.append(f'<text x="{left - 6}" y="{y(loss)}" text-anchor="end" {text}>{loss:.3g}</text>')
        parts.append(f'<text x="{x(rate)}" y="{top + height + 18}" text-anchor="middle" {text}>{rate:.1e}</text>')
    return "\n".join([*parts, "</svg>", ""])
