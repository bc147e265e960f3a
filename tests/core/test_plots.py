"""Names in a picture: each is seen to belong to its own point."""

from __future__ import annotations

from matplotlib.text import Annotation, Text

from milkglass.plots import FAR_PIXELS, panels, plot_style, write_names


def test_a_name_that_is_moved_away_is_joined_to_its_point() -> None:
    """In a crowd the name of one point may stand nearer to another one."""
    with plot_style():
        _, (axes,) = panels(1, 400, 300)
        axes.set(xlim=(0, 100), ylim=(0, 100))
        points = [*((50.0 + number % 2, 50.0 - number) for number in range(8)), (90.0, 90.0)]
        write_names(axes, points, [*(f"a name of number {number}" for number in range(8)), "alone"])
    names = {text.get_text(): text for text in axes.texts if isinstance(text, Annotation)}
    assert len(names) == len(points)
    is_joined = {name: text.arrow_patch is not None for name, text in names.items()}
    is_far = {name: max(map(abs, text.xyann)) > FAR_PIXELS for name, text in names.items()}
    assert is_joined == is_far and any(is_joined.values()) and not is_joined["alone"]


def test_names_of_many_near_points_do_not_cover_each_other() -> None:
    """Ways of nearly the same quality that nothing is read of lie close together."""
    with plot_style():
        figure, (axes,) = panels(1, 640, 400)
        axes.set(xlim=(0, 100), ylim=(0, 100))
        points = [(0.0 + number / 4, 50.0 - number / 3) for number in range(12)]
        write_names(axes, points, ["way-0,\nand another", *(f"way-{number}" for number in range(1, 12))])
        figure.draw_without_rendering()
        boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the line to the point
    outside = axes.get_window_extent()
    assert not any(box.overlaps(other) for at, box in enumerate(boxes) for other in boxes[:at])
    assert all(outside.x0 <= box.x0 and box.x1 <= outside.x1 for box in boxes)
    assert all(outside.y0 <= box.y0 and box.y1 <= outside.y1 for box in boxes)
