"""Messages arrive once and in order, whatever is lost, repeated or cut on the way."""

from __future__ import annotations

import asyncio
import random

import pytest
import zmq.asyncio

from megatron_rl import messages as m
from megatron_rl.delivery import UNACKNOWLEDGED, FrameError, Link, Links
from megatron_rl.orchestrator.connection import Connection
from megatron_rl.orchestrator_connection import OrchestratorConnection
from tests.proxy import Proxy


def exchange(rng: random.Random, steps: int) -> tuple[list[list[int]], list[int], list[Link]]:
    """Return (numbers received by each side, how many each sent, the links) after random losses."""
    links, wires = [Link(), Link()], [[], []]
    received, sent = [[], []], [0, 0]

    def deliver(side: int) -> None:
        is_message, back = links[side].receive(*(frame := wires[side].pop(0)))
        received[side] += [int(frame[1])] if is_message else []
        wires[1 - side].extend(back)

    for _ in range(steps):
        side, chance = rng.randrange(2), rng.random()
        if chance < 0.3:
            sent[side] += 1
            wires[1 - side].append(links[side].send(b"%d" % sent[side]))
        elif chance < 0.85 and wires[side]:
            deliver(side)
        elif chance < 0.90:  # a cut: what is under way is lost, from some place on
            for wire in wires:
                del wire[rng.randrange(len(wire) + 1) :]
            wires[1].extend(links[0].reconnected())
        elif chance < 0.92 and wires[side]:  # sent again by the socket itself
            wires[side].insert(rng.randrange(len(wires[side])), wires[side][0])
        else:
            wires[1 - side].extend(links[side].tick())
    for _ in range(10):
        for side in (0, 1):
            wires[1 - side].extend(links[side].tick())
            while wires[side]:
                deliver(side)
    return received, sent, links


def test_every_message_arrives_once_and_in_order_whatever_is_lost() -> None:
    for seed in range(300):
        received, sent, links = exchange(random.Random(seed), 400)
        assert received == [list(range(1, sent[1 - side] + 1)) for side in (0, 1)], seed
        assert [link.all_delivered for link in links] == [True, True], seed


def test_a_stream_in_one_direction_is_acknowledged_before_it_fills_the_memory() -> None:
    a, b = Link(), Link()
    for _ in range(10 * UNACKNOWLEDGED):
        _, back = b.receive(*a.send(b"x"))
        for frame in back:
            a.receive(*frame)
        assert len(a._all_kept()) < UNACKNOWLEDGED
    assert a.tick() == b.tick() == []
    lost = a.send(b"lost")
    (last,) = a.tick()
    _, (request,) = b.receive(*last)
    assert a.receive(*request) == (False, [lost])


def test_a_process_that_is_started_anew_gets_nothing_that_was_meant_for_the_one_before() -> None:
    links, before, after = Links(), Link(), Link()
    assert links.receive(b"g", *before.send(b"hello"))[0]
    late = before.send(b"late")
    old = links.send("g", b"for the one before")
    assert links.receive(b"g", *after.send(b"hello again"))[0]
    assert after.receive(*old) == (False, [])
    assert links.receive(b"g", *late) == (False, [])
    assert after.receive(*links.send("g", b"for this one"))[0]
    assert links.undelivered() == ["g"]


def test_bytes_of_another_version_are_refused_with_the_remedy() -> None:
    with pytest.raises(FrameError, match="has 5 bytes.*install the same version"):
        Links().receive(b"g", b"hello", b"")


def test_what_is_left_of_a_connection_that_was_replaced_is_dropped() -> None:
    async def go() -> list[int]:
        arrived: list[int] = []
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind("tcp://127.0.0.1:*")
            endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            connection = Connection(socket, lambda _, message: arrived.append(message.step))
            before, after = OrchestratorConnection(endpoint, "generator-0"), None
            for step in range(3):
                before.send(m.BatchRequest(step=step))
            while before.disconnected_since is not None:
                await asyncio.sleep(0.01)
            before.close(0.2)  # nothing is read yet: its connection is open, and has messages
            after = OrchestratorConnection(endpoint, "generator-0")
            after.send(m.BatchRequest(step=10))
            while after.disconnected_since is not None:
                await asyncio.sleep(0.01)
            async with connection, asyncio.timeout(20):
                while 10 not in arrived:
                    if (event := await connection.next_event(0.1)) is not None:
                        event()
                    await connection.flush()
            after.close()
        return arrived

    assert asyncio.run(go())[-1] == 10


async def talk(cut_every: int) -> tuple[list[tuple[str, int]], dict[str, list[int]], int]:
    """Exchange 1,500 messages in both directions with two peers; a cut after every `cut_every`."""
    count, names = 1_500, ("generator-0", "generator-1")
    arrived: list[tuple[str, int]] = []
    got: dict[str, list[int]] = {name: [] for name in names}
    loop = asyncio.get_running_loop()
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind("tcp://127.0.0.1:*")
        connection = Connection(socket, lambda name, message: arrived.append((name, message.step)))
        async with Proxy(socket.getsockopt_string(zmq.LAST_ENDPOINT)) as proxy, connection:
            peers = [
                OrchestratorConnection(
                    proxy.endpoint, name,
                    lambda data, name=name: loop.call_soon_threadsafe(
                        got[name].append, m.decode(data).step
                    ),
                )
                for name in names
            ]  # fmt: skip
            sent = cuts = 0
            async with asyncio.timeout(60):
                while len(arrived) < 2 * count or any(len(g) < count for g in got.values()):
                    # Some are sent while nobody is connected.
                    connected = proxy.connections >= len(names) * (1 + cuts)
                    if sent < count and (connected or sent % cut_every < cut_every // 2):
                        for peer, name in zip(peers, names, strict=True):
                            peer.send(m.BatchRequest(step=sent))
                            # The first may be sent before the peer has ever connected.
                            connection.send(name, m.StateSaved(step=sent))
                        sent += 1
                        if sent % cut_every == 0:
                            cuts += 1
                            proxy.cut()
                    if (event := await connection.next_event(0.001)) is not None:
                        event()
                    await connection.flush()
            for peer in peers:
                peer.close()
    return arrived, got, proxy.connections


def test_connections_that_are_cut_lose_nothing_repeat_nothing_and_raise_nothing() -> None:
    arrived, got, connections = asyncio.run(talk(150))
    assert connections >= 2 * 10
    for name, numbers in got.items():
        assert numbers == list(range(1_500)), name
        assert [number for sender, number in arrived if sender == name] == list(range(1_500)), name
