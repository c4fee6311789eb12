"""What each pass did to a graph, as a diff, for `TORCH_LOGS="+qcompile"`; nothing is computed where nobody listens."""

from __future__ import annotations

import difflib
import logging

from torch import fx

log = logging.getLogger("qcompile")


class GraphLog:
    """Remembers the text of a graph and logs, at debug level, how a pass has changed it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm, self.lines = gm, self._lines(gm)
        if self.lines:
            log.debug("graph with an update:\n%s", "\n".join(self.lines))

    def after(self, name: str) -> None:
        """Log what the pass of this name has changed."""
        if not log.isEnabledFor(logging.DEBUG):
            return
        before, self.lines = self.lines, self._lines(self.gm)
        changed = list(difflib.unified_diff(before, self.lines, "before", name, lineterm="", n=1))
        log.debug("%s: %s", name, "\n".join(["changed", *changed]) if changed else "nothing changed")

    @staticmethod
    def _lines(gm: fx.GraphModule) -> list[str]:
        return str(gm.graph).splitlines() if log.isEnabledFor(logging.DEBUG) else []
