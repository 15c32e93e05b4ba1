"""The loops of programs that post and poll themselves, without an event loop.

``w`` has two connected QPs, their CQs, and makes work requests: write(), message(), receive(). ``reap(cq, most)`` polls until
something is there. ``reuse``: the same requests again and again, or new ones for each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Reap = Callable[[Any, int], int]


def write(w: Any, reap: Reap, reuse: bool) -> Any:
    only = w.write()
    wr_for = (lambda: only) if reuse else w.write
    post, cq, window = w.qps[0].post_send, w.send_cq, w.o.window

    def one_at_a_time(ops: int) -> int:
        for _ in range(ops):
            post(wr_for())
            reap(cq, 1)
        return ops

    def many(ops: int) -> int:
        posted = min(window, ops)
        done = 0
        for _ in range(posted):
            post(wr_for())
        while done < ops:
            n = reap(cq, 32)
            done += n
            n = min(n, ops - posted)
            for _ in range(n):
                post(wr_for())
            posted += n
        return done

    return one_at_a_time if window == 1 else many


def pingpong(w: Any, reap: Reap, reuse: bool) -> Any:
    a_message, a_receive = w.message(), w.receive()
    message_for, receive_for = (lambda: a_message, lambda: a_receive) if reuse else (w.message, w.receive)
    for i in range(8):
        w.qps[i & 1].post_recv(a_receive)
    turn = 0

    def run(ops: int) -> int:
        nonlocal turn
        for _ in range(ops):
            w.qps[turn].post_send(message_for())
            turn = 1 - turn
            reap(w.recv_cq, 1)
            w.qps[turn].post_recv(receive_for())
            reap(w.send_cq, 1)
        return ops

    return run
