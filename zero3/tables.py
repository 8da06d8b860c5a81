"""Tables that notebooks show: results have a `_repr_html_`, which IPython asks for."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

__all__: list[str] = []


def table(
    title: str,
    rows: Iterable[Sequence[str]],
    header: Sequence[str] = (),
    notes: Iterable[str] = (),
) -> str:
    """HTML, whose texts stand as they are. `notes`: lines under the table."""
    head = f"<thead>{_row(header, 'th')}</thead>" if header else ""
    body = "".join(_row(row, "td") for row in rows)
    told = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    caption = f"<caption>{html.escape(title)}</caption>"
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>{told}"


def _row(cells: Sequence[str], kind: str) -> str:
    shown = (f'<{kind} style="text-align: left">{html.escape(cell)}</{kind}>' for cell in cells)
    return f"<tr>{''.join(shown)}</tr>"
