"""Messages arrive once and in order, whatever is lost, repeated or cut on the way."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic as clock

import pytest
import zmq.asyncio

from megatron_rl import messages as m
from megatron_rl.delivery import (
    PING_SECONDS,
    TICK_SECONDS,
    UNACKNOWLEDGED,
    FrameError,
    Link,
    Links,
)
from megatron_rl.orchestrator.connection import Connection
from megatron_rl.orchestrator_connection import OrchestratorConnection
from tests.proxy import Proxy
from tests.router import Router


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
    assert a.tick() == []  # its acknowledgement may be on the way
    (last,) = a.tick()
    _, (request,) = b.receive(*last)
    assert a.receive(*request) == (False, [lost])


class Conversations:
    """A peer and the orchestrator's side, either of which may end, or be another process.

    A message is (session of its sender when it was sent, number); `paired` has, for each session
    that received any, the session that they came from, and `received` their numbers.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.links, self.link = Links(), Link()
        self.to_links: list[tuple[bytes, bytes]] = []
        self.to_peer: list[tuple[bytes, bytes]] = []
        self.sent: Counter[int] = Counter()
        self.paired: dict[int, int] = {}
        self.process = dict[int, int]()
        """Of each receiving session: 0 for peers, a number for each orchestrator's process."""
        self.received: defaultdict[int, list[int]] = defaultdict(list)
        self.begun = 0
        self.before: list[Links] = []

    @property
    def other(self) -> Link:
        """The orchestrator's side of the conversation now."""
        return self.links._links["g"]

    def send(self) -> None:
        if self._rng.random() < 0.5:
            self.to_links.append(self.link.send(self._payload(self.link)))
        else:
            self.to_peer += self.links.send("g", self._payload(self.other))

    def _payload(self, link: Link) -> bytes:
        self.sent[link.session] += 1
        return b"%d %d" % (link.session, self.sent[link.session])

    def deliver(self, duplicates: float = 0.0) -> None:
        wire = self._rng.choice([w for w in (self.to_links, self.to_peer) if w] or [[]])
        if not wire:
            return
        frame = wire[0] if self._rng.random() < duplicates else wire.pop(0)
        if wire is self.to_links:
            is_message, back = self.links.receive(b"g", *frame)
            self.to_peer += back
            link = self.other
        else:
            link = self.link
            is_message, back = link.receive(*frame)
            self.to_links += back
            if link.is_ended:
                self.begun += 1
                self.link = Link()
                self.to_links += self.link.reconnected()
        if is_message:
            source, number = map(int, frame[1].split())
            assert self.paired.setdefault(link.session, source) == source, "a mixture"
            self.received[link.session].append(number)
            self.process[link.session] = id(self.links) if wire is self.to_links else 0

    def tick(self) -> None:
        self.to_links += self.link.tick()
        self.to_peer += [frame for _, frame in self.links.tick()]

    def connect_again(self) -> None:
        """Lose what is under way, from some place on."""
        for wire in (self.to_links, self.to_peer):
            del wire[self._rng.randrange(len(wire) + 1) :]
        self.to_links += self.link.reconnected()

    def end(self) -> None:
        self.to_peer += self.links.end("g")

    def replace_links(self) -> None:
        self.before.append(self.links)
        self.links, self.to_links = Links(), []
        self.connect_again()

    def replace_peer(self) -> None:
        self.link, self.to_peer = Link(), []
        self.connect_again()

    def settle(self) -> None:
        for _ in range(12):
            self.tick()
            while self.to_links or self.to_peer:
                self.deliver()

    def check(self) -> None:
        """Every session heard one other session, all that it heard in order, and the last pair all.

        Raises:
            AssertionError: it is not so.
        """
        # What one orchestrator received and lost with its process, the next one receives again.
        pairs = [(self.process[to], source) for to, source in self.paired.items()]
        assert len(pairs) == len(set(pairs)), "a message went to two conversations"
        for numbers in self.received.values():
            assert numbers == list(range(1, len(numbers) + 1))
        for link, other in ((self.link, self.other), (self.other, self.link)):
            assert (link.peer, link.all_delivered) == (other.session, True)
            assert len(self.received[link.session]) == self.sent[other.session]


def test_conversations_that_end_at_any_point_are_never_mixed_and_the_last_one_is_whole() -> None:
    begun = 0
    for seed in range(400):
        c = Conversations(rng := random.Random(seed))
        c.connect_again()
        for _ in range(300):
            if (chance := rng.random()) < 0.3:
                c.send()
            elif chance < 0.85:
                c.deliver(duplicates=0.03)
            elif chance < 0.90:
                c.tick()
            elif chance < 0.94:
                c.connect_again()
            elif chance < 0.97:
                for _ in range(rng.randrange(1, 3)):  # also two in a row
                    c.end()
            else:
                rng.choice([c.replace_links, c.replace_peer])()
        c.send()
        c.settle()
        c.send()
        c.settle()
        c.check()
        begun += c.begun
    assert begun > 1_000


def test_an_end_or_another_process_before_each_single_frame_begins_one_new_conversation() -> None:
    for change in (Conversations.end, Conversations.replace_links):
        for point in range(40):
            c = Conversations(random.Random(7))
            c.connect_again()
            for step in range(40):
                if step == point:
                    change(c)
                c.send()
                c.deliver()
            c.settle()
            c.check()
            assert c.begun <= 1, "once is enough"
        assert c.begun == 1


def test_a_process_that_is_started_anew_gets_nothing_that_was_meant_for_the_one_before() -> None:
    links, before, after = Links(), Link(), Link()
    assert links.receive(b"g", *before.send(b"hello"))[0]
    late = before.send(b"late")
    (old,) = links.send("g", b"for the one before")
    assert links.receive(b"g", *after.send(b"hello again"))[0]
    assert after.receive(*old) == (False, [])
    is_message, (answer,) = links.receive(b"g", *late)
    assert not is_message
    assert after.receive(*answer) == (False, [])
    before.receive(*answer)
    assert (after.is_ended, before.is_ended) == (False, True)
    assert after.receive(*links.send("g", b"for this one")[0])[0]
    assert links.undelivered() == ["g"]


def test_what_is_sent_to_a_peer_that_has_not_spoken_waits_for_it_and_an_end_drops_it() -> None:
    links, peer = Links(), Link()
    assert links.send("g", b"dropped") == links.end("g") == []
    assert links.send("g", b"first") == links.tick() == []
    assert links.undelivered() == ["g"]
    _, frames = links.receive(b"g", *peer.reconnected()[0])
    (begin,) = links.end("g")
    assert [peer.receive(*frame)[0] for frame in frames] == [True], "it was under way"
    assert links.send("g", b"for the next conversation") == []
    assert links.receive(b"g", *peer.send(b"late"))[0] is False
    assert peer.receive(*begin) == (False, [])
    assert peer.is_ended
    _, frames = links.receive(b"g", *(peer := Link()).reconnected()[0])
    assert [peer.receive(*frame)[0] for frame in frames] == [True]


def test_each_side_pings_and_nobody_else_does() -> None:
    links, peer = Links(), Link()
    now = clock()
    links.receive(b"g", *peer.reconnected()[0])
    links.send("never heard of", b"")
    assert peer.tick(now + 1) == links.tick(now + 1) == []
    due = now + PING_SECONDS - TICK_SECONDS
    (ping,) = peer.tick(due)
    ((name, pong),) = links.tick(due)
    assert name == "g"
    assert links.receive(b"g", *ping) == peer.receive(*pong) == (False, [])


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


@pytest.fixture
def router() -> Iterator[zmq.asyncio.Socket]:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.set_hwm(0)
        socket.bind("tcp://127.0.0.1:*")
        yield socket


async def serve(connection: Connection, until: Callable[[], object], seconds: float = 30.0) -> None:
    """Handle events until the condition holds.

    Raises:
        AssertionError: it does not within these seconds.
    """
    deadline = clock() + seconds
    while not until():
        assert clock() < deadline, f"not within {seconds} s"
        if (event := await connection.next_event(0.05)) is not None:
            event()
        await connection.flush()


def test_a_conversation_that_is_ended_begins_again_without_a_message_of_the_one_before(
    router: zmq.asyncio.Socket,
) -> None:
    arrived: list[m.Message] = []
    at_peer: list[m.Message | str] = []

    async def go() -> None:
        connection = Connection(router, lambda _, message: arrived.append(message))
        peer = OrchestratorConnection(
            router.getsockopt_string(zmq.LAST_ENDPOINT),
            "generator-0",
            lambda data: at_peer.append(m.decode(data)),
            lambda: at_peer.append("another conversation"),
        )
        async with connection:
            peer.send(m.Join(process="1", supervised=True))
            await serve(connection, lambda: arrived)
            connection.send("generator-0", m.StateSaved(step=1))
            await serve(connection, lambda: peer._link._received == peer._link._told == 1)
            peer.send(m.Leaving())
            async with asyncio.timeout(20):
                await connection.flush()
                while not connection._events:  # it is read, and not handled
                    await asyncio.sleep(0.01)
            connection.end("generator-0")
            connection.send("generator-0", m.StateSaved(step=2))
            await serve(connection, lambda: len(at_peer) == 3, 1.4)  # without a ping
            peer.send(m.Left())  # by a thread that has not heard of it
            peer.send(m.Join(process="2", supervised=True))
            peer.send(m.BatchRequest(step=3))
            await serve(connection, lambda: len(arrived) == 3)
        peer.close()

    asyncio.run(go())
    assert at_peer == [m.StateSaved(step=1), "another conversation", m.StateSaved(step=2)]
    one, two = (m.Join(process=process, supervised=True) for process in "12")
    assert arrived == [one, two, m.BatchRequest(step=3)]


def test_a_first_message_that_was_sent_before_the_end_is_dropped_too() -> None:
    goes_on, began = threading.Event(), threading.Event()
    router = Router()
    peer = OrchestratorConnection(router.endpoint, "g", lambda _: goes_on.wait(20), began.set)
    try:
        peer.send(m.Join(process="1", supervised=True))
        assert router.receive(10) == ("g", m.Join(process="1", supervised=True))
        router.send("g", m.Stop())
        router.end("g")
        time.sleep(0.3)  # both are at the peer, whose thread is busy with the first
        peer.send(m.Join(process="late", supervised=True))
        goes_on.set()
        assert began.wait(10)
        assert router.receive(0.5) is None
        peer.send(m.Join(process="2", supervised=True))
        assert router.receive(10) == ("g", m.Join(process="2", supervised=True))
    finally:
        goes_on.set()
        peer.close()
        router.close()
    with pytest.raises(ConnectionError, match="it was closed"):
        peer.send(m.Left())
    peer.send_failed("after the end")


def test_a_peer_that_cannot_begin_again_is_told_and_its_own_error_is_not_hidden(
    router: zmq.asyncio.Socket,
) -> None:
    async def go() -> None:
        connection = Connection(router, lambda *_: None)
        peer = OrchestratorConnection(router.getsockopt_string(zmq.LAST_ENDPOINT), m.TRAINER)
        async with connection:
            await serve(connection, lambda: connection.heard)
            connection.end(m.TRAINER)
            await serve(connection, lambda: peer.error, 1.2)  # before its next ping
        for call in (lambda: peer.receive(0), lambda: peer.send(m.Leaving())):
            with pytest.raises(ConnectionError, match="the orchestrator is another process now"):
                call()
        peer.send_failed("of another kind")
        peer.close()
        peer.send_failed("after the end")

    asyncio.run(go())


def test_silence_and_a_closed_connection_are_seen_and_its_own_pauses_are_not_counted(
    router: zmq.asyncio.Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with Proxy(router.getsockopt_string(zmq.LAST_ENDPOINT)) as proxy:
            connection = Connection(router, lambda *_: None)
            near = OrchestratorConnection(router.getsockopt_string(zmq.LAST_ENDPOINT), "near")
            far = OrchestratorConnection(proxy.endpoint, "far")
            heard, closed = connection.heard, connection.closed
            async with connection:
                await serve(connection, lambda: len(heard) == 2)
                pinged = dict(heard)
                await serve(connection, lambda: all(heard[n] > pinged[n] for n in heard), 2.5)
                assert closed == {}
                # A peer hangs, and meanwhile this process stands still.
                goes_on = threading.Event()
                far._deliver = lambda _: goes_on.wait(60)
                connection.send("far", m.Stop())
                await serve(connection, lambda: clock() - heard["far"] > 2.2, 8)
                before = {name: clock() - at for name, at in heard.items()}
                time.sleep(3)
                await connection.next_event(0)
                after = {name: clock() - at for name, at in heard.items()}
                assert before["far"] - 1 < after["far"] < before["far"] + 0.5
                assert 0 <= after["near"] < before["near"] + 0.5
                await serve(connection, lambda: clock() - heard["far"] > 3.5, 8)
                goes_on.set()
                await serve(connection, lambda: clock() - heard["far"] < 1, 4)
                # A connection is closed, and made again.
                proxy.refuses = True
                proxy.cut()
                await serve(connection, lambda: "far" in closed, 2.5)
                assert set(closed) == {"far"}
                since = closed["far"]
                await serve(connection, lambda: clock() - since > PING_SECONDS + 0.2)
                assert closed == {"far": since}
                time.sleep(2)
                await connection.next_event(0)
                assert clock() - closed["far"] < PING_SECONDS + 1
                proxy.refuses = False
                await serve(connection, lambda: not closed, 5)
            near.close()
            far.close()

    asyncio.run(go())


def test_a_peer_follows_the_file_to_the_next_orchestrator_and_begins_again(tmp_path: Path) -> None:
    file, name = tmp_path / "orchestrator.json", "generator-0"
    began: list[float] = []
    peer = OrchestratorConnection(file, name, on_new_conversation=lambda: began.append(clock()))
    routers: list[Router] = []
    try:
        peer.send(m.Join(process="before there is an orchestrator", supervised=True))
        assert (peer.receive(0.3), peer.endpoint) == (None, str(file))
        file.write_text('{"endpoint": ')
        for count in range(3):
            routers.append(router := Router())
            address = file.with_suffix(".new")
            address.write_text(json.dumps({"endpoint": router.endpoint, "process": 7}))
            started = clock()
            address.rename(file)
            if count == 1:
                peer.send(m.Leaving())  # in an outbox, or kept
            if count:
                while len(began) < count:
                    assert clock() < started + 5
                    assert router.receive(0.05) is None
                assert began[-1] - started < 3
                peer.send(m.Left())
                peer.send(m.Join(process=str(count), supervised=True))
            message = router.receive(5)
            assert message is not None
            assert clock() - started < 3
            assert isinstance(message[1], m.Join)
            assert message[1].process == str(count) or not count
            assert peer.endpoint == router.endpoint
            router.send(name, m.StateSaved(step=count))
            assert peer.receive(5) == m.StateSaved(step=count)
            peer.send(m.BatchRequest(step=count))
            assert router.receive(5) == (name, m.BatchRequest(step=count))
            router.close()
        assert len(began) == 2
        # The orchestrator that is named is not there: without an end, and without a connection.
        deadline = clock() + 5
        while peer.disconnected_since is None:
            assert clock() < deadline
            time.sleep(0.01)
        assert peer.error is None
    finally:
        peer.close()


def test_a_file_without_an_endpoint_is_named_until_it_has_one(tmp_path: Path) -> None:
    file = tmp_path / "orchestrator.json"
    file.write_text("[]")
    router, peer = Router(), OrchestratorConnection(file, "generator-0")
    try:
        deadline = clock() + 5
        while peer.endpoint != f"{file}, which has no endpoint":
            assert clock() < deadline
            time.sleep(0.01)
        file.write_text(json.dumps({"endpoint": router.endpoint}))
        peer.send(m.Leaving())
        assert router.receive(5) == ("generator-0", m.Leaving())
    finally:
        peer.close()
        router.close()


def test_what_cannot_be_handled_yet_stays_in_the_socket_and_no_other_peer_seems_silent(
    router: zmq.asyncio.Socket,
) -> None:
    arrived: list[tuple[str, int]] = []

    async def go() -> None:
        connection = Connection(router, lambda name, message: arrived.append((name, message.step)))
        endpoint, names = router.getsockopt_string(zmq.LAST_ENDPOINT), ("loud", "quiet")
        loud, quiet = (OrchestratorConnection(endpoint, name) for name in names)
        for step in range(1_000):
            loud.send(m.BatchRequest(step=step))
        async with connection, asyncio.timeout(30):
            while len(connection._events) < 200:
                await connection.flush()
                await asyncio.sleep(0.01)
            quiet.send(m.BatchRequest(step=0))
            for _ in range(50):
                await connection.flush()
                await asyncio.sleep(0.01)
                assert len(connection._events) == 200
            while not arrived or arrived[-1][0] != "quiet":
                event = connection.waiting_event()
                assert event is not None
                event()
                await connection.flush()
                await asyncio.sleep(0)
            assert len(arrived) < 500, "the socket takes the peers in turn"
            await serve(connection, lambda: len(arrived) == 1_001)
        loud.close()
        quiet.close()

    asyncio.run(go())
    assert [step for name, step in arrived if name == "loud"] == list(range(1_000))
