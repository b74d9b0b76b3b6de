"""Connections between ranks: who knows the secret is let in, and nobody else."""

import contextlib
import socket
import threading
import time
from multiprocessing import connection as links

import pytest
from torch.distributed import HashStore

from torchhook.rules.entry import Entry
from torchhook.stats.reading import Snapshot
from torchhook.training.ranks import gather as gather_module
from torchhook.training.ranks import tree as tree_module
from torchhook.training.ranks.gather import Answers, Gather
from torchhook.training.ranks.seat import Seat
from torchhook.training.ranks.tree import Tree


@pytest.fixture
def trees():
    made = []

    def tree(rank, store):
        made.append(Tree(rank, store, "torchhook/0", "127.0.0.1"))
        return made[-1]

    yield tree
    for one in made:
        one.close()


def address(store, rank):
    host, _, port = store.get(f"torchhook/0/{rank}").decode().rpartition(" ")
    return host, int(port)


def joined(root, tree):
    """The ranks that `root` lets in, once `tree` has called it."""
    tree.find(lambda: True)
    caller = threading.Thread(target=tree.climb)
    caller.start()
    caller.join(20)
    until = time.monotonic() + 10
    while not root.children and time.monotonic() < until:
        list(root.admit())
        time.sleep(0.01)
    return set(root.children)


def test_who_knows_the_secret_is_let_in(trees):
    store = HashStore()
    root, other = trees(0, store), trees(1, store)
    assert joined(root, other) == {1} and other.parent.rank == 0 and not other.is_root


def test_without_the_secret_nobody_is_let_in(trees):
    store = HashStore()
    root, other = trees(0, store), trees(1, store)
    silent = socket.create_connection(address(store, 0))  # says nothing, and keeps nobody waiting
    with socket.create_connection(address(store, 0)) as plain:
        wrong = links.Connection(plain.detach())
        with pytest.raises(links.AuthenticationError):
            links.answer_challenge(wrong, b"a guess")
    with socket.create_connection(address(store, 0)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        plain.shutdown(socket.SHUT_WR)
        plain.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while plain.recv(1024):  # the challenge, and then the end
                pass
    assert joined(root, other) == {1}
    silent.close()


def test_a_rank_that_lies_about_the_secret_is_not_followed(trees):
    """Both ends prove that they know it: a rank does not send what it has to a stranger at its parent's address."""
    store = HashStore()
    other = trees(1, store)
    store.set("torchhook/0/secret", b"the real one")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        store.set("torchhook/0/0", f"127.0.0.1 {stranger.getsockname()[1]}")

        def answer():
            plain, _ = stranger.accept()
            pipe = links.Connection(plain.detach())
            pipe.send_bytes(b"#CHALLENGE#" + b"{sha256}" + b"x" * 40)
            pipe.recv_bytes()
            pipe.send_bytes(b"#WELCOME#")
            challenge = pipe.recv_bytes()
            assert challenge.startswith(b"#CHALLENGE#")
            pipe.send_bytes(b"{sha256}" + b"0" * 32)
            said.append(pipe.recv_bytes())
            pipe.close()

        said = []
        thread = threading.Thread(target=answer)
        thread.start()
        other.find(lambda: True)
        other.climb()
        thread.join(10)
    assert said == [b"#FAILURE#"] and other.parent is None and other.is_root


def test_a_rank_that_is_found_only_after_the_root_has_ended_is_in_the_run(trees):
    """A training of milliseconds is over before its ranks have met, and has more steps than wait for a rank."""
    store, delivered, faults = HashStore(), [], []
    calls = Answers(delivered.append, lambda folder: -2, lambda news: None, faults.append)
    root = Gather(Seat(0), 2, trees(0, store), calls)
    for step in range(40):
        root.put(Entry(step, 0.0, Snapshot({})))
    ending = threading.Thread(target=root.close, args=(40, "ended"))
    ending.start()
    until = time.monotonic() + 10
    while len(delivered) < 10 and time.monotonic() < until:  # the first steps no longer wait
        time.sleep(0.01)
    other = Gather(Seat(1), 2, trees(1, store), calls)
    for step in range(20):
        other.put(Entry(step, 0.0, Snapshot({})))
    other.close(20, "ended")
    ending.join(20)
    assert not faults and len(delivered) == 41
    members = delivered[-1].ranks.members
    assert {rank: (known.steps, known.state) for rank, known in members.items()} == {0: (40, "ended"), 1: (20, "ended")}


def until(is_so, seconds=15):
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_so()


def gathered(store, trees, rank, world):
    """A gathering, with the steps and ranks that it delivers, the folders that it takes over, and its faults."""
    delivered, folders, faults = [], [], []

    def take_over(folder):
        folders.append(folder)
        return -2

    def deliver(entry):
        delivered.append((entry.step, sorted(entry.ranks.facts), entry.ranks.members))

    calls = Answers(deliver, take_over, lambda news: None, faults.append)
    return Gather(Seat(rank), world, trees(rank, store), calls), delivered, folders, faults


def test_what_a_lost_root_has_not_written_is_written_by_the_next(trees):
    store = HashStore()
    root = trees(0, store)  # lets rank 1 in, and reads nothing
    one, delivered, _, faults = gathered(store, trees, 1, 2)
    until(lambda: list(root.admit()) or root.children)
    for step in range(4):
        one.put(Entry(step, 0.0, Snapshot({})))
    until(lambda: len(one._sent) == 4)
    root.close()
    until(lambda: len(delivered) == 4)
    one.close(4, "ended")
    assert [step for step, *_ in delivered] == [0, 1, 2, 3, 3] and not faults


def test_a_rank_that_was_never_told_where_the_run_is_goes_on_with_it(trees):
    store = HashStore()
    root = trees(0, store)
    root.keep_run("runs/net")
    root.close()
    one, _, folders, faults = gathered(store, trees, 1, 2)
    until(lambda: folders)
    one.close(0, "ended")
    assert folders == ["runs/net"] and not faults


def test_a_new_root_that_ends_waits_for_the_ranks_that_the_old_one_had(trees):
    store = HashStore()
    root = trees(0, store)
    one, delivered, folders, _ = gathered(store, trees, 1, 3)
    two = trees(2, store)  # which calls late
    until(lambda: list(root.admit()) or root.children)
    root.close()
    until(lambda: folders)
    ending = threading.Thread(target=one.close, args=(5, "ended"))
    ending.start()
    time.sleep(1.5)
    two.find(lambda: True)
    two.climb()
    assert two.parent is not None and two.parent.rank == 1
    two.close()
    ending.join(20)
    assert delivered[-1][2][1].state == "ended"


def test_a_rank_that_ends_takes_over_if_its_parent_dies(trees):
    store = HashStore()
    root = trees(0, store)
    one, delivered, folders, _ = gathered(store, trees, 1, 2)
    one._awaited.add(7)  # another rank below it, for which it waits
    until(lambda: list(root.admit()) or root.children)
    ending = threading.Thread(target=one.close, args=(5, "failed"))
    ending.start()
    time.sleep(0.3)
    root.close()
    ending.join(20)
    assert folders == [None] and delivered[-1][2][0].state == "lost"


def test_a_rank_that_waits_in_vain_for_the_first_says_that_it_writes_a_run_of_its_own(trees, monkeypatch):
    monkeypatch.setattr(tree_module, "_ARRIVAL", 0.2)
    said = []
    monkeypatch.setattr(gather_module, "warn", said.append)
    one, _, folders, _ = gathered(HashStore(), trees, 1, 2)
    until(lambda: folders)
    until(lambda: said)
    one.close(0, "ended")
    assert said == ["rank 0 is not watched yet, so rank 1 writes a run of its own"]
