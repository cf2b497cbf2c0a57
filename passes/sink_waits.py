"""Let a collective run while what does not need it goes on."""

from __future__ import annotations

from torch import fx


def sink_waits(graph: fx.Graph, in_flight: int) -> fx.Graph:
    """Move every wait, and what only unpacks its result, down to the first reader; a bucket is unpacked as a whole.

        %g   = all_reduce(%dw2);  %g_w = wait_tensor(%g)
        %dh  = mm(%dy, %w2)
        return %g_w
    becomes
        %g   = all_reduce(%dw2)
        %dh  = mm(%dy, %w2)
        %g_w = wait_tensor(%g)
        return %g_w

    A reduce-scatter holds the whole gradient until it is waited for: at most `in_flight` of them go on at a time.

    Needs: `meta["tail"]`, the number of the collective, on waits and what unpacks; `meta["holds"]`, the same number, on
    the start of a reduce-scatter.  Leaves: the same values.
    """
    tails: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if "tail" in node.meta:
            tails.setdefault(node.meta["tail"], []).append(node)
    placed: set[int] = set()

    def settle(number: int, reader: fx.Node) -> None:
        """Put a collective's tail in front of a reader, and before it the tails that it reads itself."""
        if number in placed:
            return
        placed.add(number)
        for node in tails[number]:
            for source in node.all_input_nodes:
                if source.meta.get("tail", number) != number:
                    settle(source.meta["tail"], reader)
            reader.prepend(node)

    going: list[int] = []
    for node in list(graph.nodes):
        if "tail" in node.meta:
            continue
        while len(going) > in_flight:
            settle(going.pop(0), node)
        for source in node.all_input_nodes:
            if "tail" in source.meta:
                settle(source.meta["tail"], node)
        if "holds" in node.meta:
            going.append(node.meta["holds"])
    graph.lint()
    return graph
