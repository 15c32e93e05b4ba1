"""The directive ``completion-statuses``: a table of the statuses of enum ibv_wc_status, made from the exceptions."""

from __future__ import annotations

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import aiordma


def _entry(*children: nodes.Node) -> nodes.entry:
    return nodes.entry("", nodes.paragraph("", "", *children))


class CompletionStatuses(SphinxDirective):
    """One row for each subclass of CompletionError, in the order of the statuses."""

    def run(self) -> list[nodes.Node]:
        table = nodes.table(classes=["statuses"])
        group = nodes.tgroup(cols=3)
        table += group
        for width in (5, 30, 65):
            group += nodes.colspec(colwidth=width)
        head = nodes.row()
        for title in ("", "status and exception", "meaning, and usual cause"):
            head += _entry(nodes.Text(title))
        group += nodes.thead("", head)
        body = nodes.tbody()
        group += body
        for error in sorted(aiordma.CompletionError.__subclasses__(), key=lambda error: error.status):
            body += self.row(error)
        return [table]

    def row(self, error: type[aiordma.CompletionError]) -> nodes.row:
        name = f"aiordma.{error.__name__}"
        reference = pending_xref(
            "",
            nodes.literal("", error.__name__),
            refdomain="py",
            reftype="class",
            reftarget=name,
            refexplicit=True,
            refdoc=self.env.docname,
        )
        kinds = [nodes.Text(", a "), nodes.literal("", "ConnectionError")] if issubclass(error, ConnectionError) else []
        cell = nodes.entry("", nodes.paragraph("", "", nodes.literal("", error.status_name)))
        cell += nodes.paragraph("", "", reference, *kinds)
        row = nodes.row()
        row += _entry(nodes.Text(str(error.status)))
        row += cell
        row += _entry(nodes.Text(error.meaning))
        return row


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("completion-statuses", CompletionStatuses)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
