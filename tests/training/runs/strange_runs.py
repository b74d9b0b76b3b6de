"""Runs of strangers: what their folders and files may contain, each made of a good run."""

import os
import sqlite3
import struct
from contextlib import closing

from run_samples import written

from torchhook import Finding, Report
from torchhook.training.runs import RunLog
from torchhook.training.runs.schema import FILE

_ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c)"
_DEEP = "[" * 200_000


def good(folder):
    log = written(RunLog(folder), range(3))
    found = Finding("TH201", "error", "it is dead", "conv", 1)
    log.found(found)
    log.end(Report((found,), "Net"), "ended")
    return folder


def _sql(*statements):
    def change(folder):
        with closing(sqlite3.connect(folder / FILE)) as db:
            for statement in statements:
                db.execute(statement)
            db.commit()

    return change


def _instead(table, definition):
    return _sql(f"DROP TABLE {table}", definition)


def _cut(size):
    return lambda folder: os.truncate(folder / FILE, size)


def _named(name):
    return lambda folder: folder.rename(folder.with_name(os.fsdecode(name)))


def _log_of_another_file(folder):
    (folder / f"{FILE}-wal").write_bytes(b"garbage" * 1000)


def _log_without_its_index(folder):
    """As a copy of a run that was being written has it, if not all files were copied."""
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("UPDATE life SET ended = ended")
        log = (folder / f"{FILE}-wal").read_bytes()
    (folder / f"{FILE}-wal").write_bytes(log)


def _hole_to_recover(folder):
    os.truncate(folder / FILE, 2**40)  # a hole, which takes no room
    (folder / f"{FILE}-journal").write_bytes(bytes.fromhex("d9d505f920a163d7") + bytes(2000))


def _journal_of_several(folder):
    """A journal of SQLite that is rolled back with others; it then deletes the file that they name."""
    victim, magic = folder / "victim.txt", bytes.fromhex("d9d505f920a163d7")
    victim.write_text("precious")
    name = os.fsencode(victim)
    with closing(sqlite3.connect(folder / FILE)) as db:
        ((pages,),), ((size,),) = db.execute("PRAGMA page_count"), db.execute("PRAGMA page_size")
    header = magic + struct.pack(">IIIII", 0, 0, pages, 512, size)
    trailer = struct.pack(">I", 2**30 // size + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    (folder / f"{FILE}-journal").write_bytes(header.ljust(512, b"\0") + trailer)


def _index_is_also_elsewhere(folder):
    _log_without_its_index(folder)
    (folder / "victim.txt").write_text("precious")
    os.link(folder / "victim.txt", folder / f"{FILE}-shm")


def _log_is_a_hole(folder):
    (folder / f"{FILE}-wal").touch()
    os.truncate(folder / f"{FILE}-wal", 2**28)


def _beside_is_a_pipe(suffix):
    return lambda folder: os.mkfifo(folder / f"{FILE}{suffix}")


def _file_is_a_pipe(folder):
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


def _file_is_a_link(target):
    def change(folder):
        (folder / FILE).unlink()
        (folder / FILE).symlink_to(target)

    return change


def _forged(folder):
    _sql(
        "DROP TABLE losses",
        f"CREATE VIEW losses AS {_ENDLESS} SELECT n AS step, 1.0 AS loss FROM c",
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET type = 'table', rootpage = 3 WHERE name = 'losses'",
    )(folder)


REFUSED = {  # such a run is a row that says why
    "an endless view as losses": _instead(
        "losses", f"CREATE VIEW losses AS {_ENDLESS} SELECT n AS step, 1.0 AS loss FROM c"
    ),
    "an endless view as life": _instead(
        "life",
        f"CREATE VIEW life AS {_ENDLESS} SELECT 'ended' AS state, n AS started, n AS ended, '{{}}' AS owner FROM c",
    ),
    "a view that claims to be a table": _forged,
    "a view of another name": _sql("CREATE VIEW more AS SELECT 1"),
    "a trigger": _sql("CREATE TRIGGER t AFTER INSERT ON losses BEGIN DELETE FROM losses; END"),
    "a column that is computed": _instead(
        "losses",
        "CREATE TABLE losses (step INTEGER PRIMARY KEY, loss REAL AS (length(hex(zeroblob(step)))))",
    ),
    "a column that was computed and stored": _sql(
        "DROP TABLE windows",
        "CREATE TABLE windows (step INTEGER PRIMARY KEY, time REAL AS (step) STORED, rate REAL)",
    ),
    "a virtual table": _sql("CREATE VIRTUAL TABLE more USING fts5(x)"),
    "a table is missing": _sql("DROP TABLE life"),
    "another application": _sql("PRAGMA application_id = 1"),
    "an empty file": _cut(0),
    "a file cut in its header": _cut(60),
    "a file cut in its tables": _cut(9000),
    "a hole of a terabyte to recover": _hole_to_recover,
    "a file that is a link to a run": lambda folder: _file_is_a_link(folder.with_name("first") / FILE)(folder),
    "a log that is a link": lambda folder: (folder / f"{FILE}-wal").symlink_to(folder.with_name("first") / FILE),
    "a log that is a pipe": _beside_is_a_pipe("-wal"),
    "an index that is a pipe": _beside_is_a_pipe("-shm"),
    "a journal that is a pipe": _beside_is_a_pipe("-journal"),
    "a log that is a folder": lambda folder: (folder / f"{FILE}-wal").mkdir(),
    "a log that is a hole": _log_is_a_hole,
    "a journal that has another file deleted": _journal_of_several,
    "an index that is also a file elsewhere": _index_is_also_elsewhere,
    "a life without a row": _sql("DELETE FROM life"),
    "two lives": _instead(
        "life",
        "CREATE TABLE life AS SELECT 'ended' AS state, 1 AS started, 2 AS ended, '{}' AS owner"
        " UNION ALL SELECT 'failed', 1, 2, '{}'",
    ),
    "a start that is text": _sql("UPDATE life SET started = 'yesterday'"),
    "a start that is missing": _sql("UPDATE life SET started = NULL"),
    "a start in a year without a calendar": _sql("UPDATE life SET started = 1e300"),
    "a start that is infinite": _sql("UPDATE life SET started = 9e999"),
    "a start before 1970": _sql("UPDATE life SET started = -1e15"),
    "an end that is a blob": _sql("UPDATE life SET ended = x'00'"),
    "an owner that is missing": _sql("UPDATE life SET owner = NULL"),
    "an owner that is a list": _sql("UPDATE life SET owner = '[]', state = 'running'"),
    "an owner that is deep": _sql(f"UPDATE life SET owner = '{_DEEP}', state = 'running'"),
    "a state that is a number": _sql("UPDATE life SET state = x'ff'"),
    "a state that there is not": _sql("UPDATE life SET state = 'exploded'"),
    "a state that is an integer": _sql("UPDATE life SET state = 5"),
    "a state that is not Unicode": _sql("UPDATE life SET state = CAST(x'ff' AS TEXT)"),
    "steps that are text": _instead("losses", "CREATE TABLE losses AS SELECT 'two' AS step, 'low' AS loss"),
    "steps of windows that are text": _instead(
        "windows", "CREATE TABLE windows AS SELECT 'two' AS step, 1.0 AS time, NULL AS rate"
    ),
    "a loss that is text": _sql("UPDATE losses SET loss = 'low'"),
    "a model that is no JSON": _sql("UPDATE about SET value = '{' WHERE key = 'model'"),
    "a model that is deep": _sql(f"UPDATE about SET value = '{_DEEP}' WHERE key = 'model'"),
    "a finding that is no JSON": _sql("UPDATE findings SET data = 'x'"),
    "a finding that is a number": _sql("UPDATE findings SET data = '5'"),
    "a finding of an unknown severity": _sql("""UPDATE findings SET data = replace(data, '"error"', '"fatal"')"""),
    "a finding whose step is text": _sql("""UPDATE findings SET data = replace(data, '"step": 1', '"step": "x"')"""),
    "a finding whose message is a list": _sql("""UPDATE findings SET data = replace(data, '"it is dead"', '[1]')"""),
    "a finding whose evidence is a list": _sql(
        """UPDATE findings SET data = replace(data, '"evidence": {}', '"evidence": []')"""
    ),
    "a finding with fields of its own": _sql(
        """UPDATE findings SET data = replace(data, '"step": 1', '"step": 1, "x": 1')"""
    ),
}
READ = {  # such a run has a row like others
    "a log without its index": _log_without_its_index,
    "a report whose layers have no kind": _sql(
        """UPDATE report SET data = replace(data, '"layers": []', '"layers": [{"site": "conv"}]')"""
    ),
    "a report whose layers have lists for numbers": _sql(
        """UPDATE report SET data = replace(
            data, '"layers": []', '"layers": [{"site": "conv", "kind": "module", "std": []}]'
        )"""
    ),
    "a report whose losses are words": _sql(
        """UPDATE report SET data = replace(data, '"losses": []', '"losses": [[0, "low"]]')"""
    ),
    "a report whose trial is empty text": _sql(
        """UPDATE report SET data = replace(data, '"tried": null', '"tried": ""')"""
    ),
    "a report whose evidence can be read and is too deep to show": _sql(
        f"""UPDATE report SET data = replace(data, '"evidence": {{}}', '"evidence": {{"a": {900 * "["}{900 * "]"}}}')"""
    ),
    "settings that can be read and are too deep to show": _sql(
        f"INSERT OR REPLACE INTO about VALUES ('optimizer', '{900 * '['}{900 * ']'}')"
    ),
    "a report with a lone surrogate": _sql(
        """UPDATE report SET data = replace(data, 'it is dead', '\\ud800\\u009b')"""
    ),
    "a name that is not Unicode": _named(b"odd\xff\xfe"),
    "a name with a newline and an escape": _named(b"odd\n\x1b[31mname"),
    "a name like an option": _named(b"--help"),
    "a name like the options of an address": _named(b"run?mode=rwc&vfs=memdb#%2e%2e"),
    "a log of another file": _log_of_another_file,
    "a model that is a table": _sql("""UPDATE about SET value = '{"a": [1]}' WHERE key = 'model'"""),
    "a model with markup": _sql("""UPDATE about SET value = '"[red]<b>\\u001b[31m\\ud800"' WHERE key = 'model'"""),
    "wires that are a number": _sql("INSERT INTO about VALUES ('wires', '5')"),
    "lines that are a number": _sql("INSERT INTO about VALUES ('lines', '5')"),
    "an owner with an endless id": _sql(f"UPDATE life SET owner = '{{\"pid\": {9**99}}}', state = 'running'"),
    "a path of thousands of levels": _sql(f"UPDATE places SET path = '{3000 * 'a.'}' WHERE id = 1"),
    "a path of millions of characters": _sql("UPDATE places SET path = hex(zeroblob(1000000)) WHERE id = 1"),
    "a path that is missing": _sql("UPDATE places SET path = NULL WHERE id = 1"),
    "statistics that are no JSON": _sql("UPDATE places SET stats = '{'"),
    "statistics that are a list": _sql("UPDATE places SET stats = '[1]'"),
    "statistics with settings that are text": _sql("""UPDATE places SET stats = '{"moments": "x"}'"""),
    "a shape below zero": _sql("UPDATE layouts SET shape = '[-1]'"),
    "a shape that is text": _sql("""UPDATE layouts SET shape = '["x"]'"""),
    "a shape beyond all memory": _sql("UPDATE layouts SET shape = '[1000000000000]'"),
    "places that are unknown": _sql("UPDATE layouts SET places = replace(places, '1', '999')"),
    "states that are text": _sql("UPDATE states SET data = 'x'"),
    "states that are cut": _sql("UPDATE states SET data = substr(data, 1, 10)"),
    "a rate that is text": _sql("UPDATE windows SET rate = 'x'"),
    "the largest step there can be": _sql("INSERT INTO losses VALUES (9223372036854775807, 1.0)"),
    "a sample without a path": _sql("INSERT INTO samples VALUES (0, NULL, NULL, 0, 0, 0)"),
    "a report that is no JSON": _sql("UPDATE report SET data = '['"),
    "no report, and states of another shape": _sql("DELETE FROM report", "UPDATE layouts SET shape = '[3, 4]'"),
    "no report, and losses of another world": _sql("DELETE FROM report", "UPDATE losses SET loss = 9e999"),
    "a report of strange types": _sql("""UPDATE report SET data = replace(data, '"checked": []', '"checked": 5')"""),
    "a report whose notes are numbers": _sql(
        """UPDATE report SET data = replace(data, '"notes": []', '"notes": [5]')"""
    ),
    "a report whose model is a list": _sql(
        """UPDATE report SET data = replace(data, '"model": "Net"', '"model": []')"""
    ),
    "evidence and facts with a number of 400 digits": _sql(
        f"""UPDATE report SET data = replace(data, '"evidence": {{}}', '"evidence": {{"a": {10**400}}}')""",
        f"INSERT OR REPLACE INTO about VALUES ('every', '{10**400}')",
    ),
    "facts that are lists": _sql(
        *(
            f"INSERT OR REPLACE INTO about VALUES ('{name}', '[[1, 2, 3]]')"
            for name in ("every", "device", "command", "versions", "containers", "shapes", "lines", "wires")
        )
    ),
    "losses and windows at both ends of all steps": _sql(
        "INSERT INTO losses VALUES (9223372036854775807, 1.0), (-9223372036854775807, 9e307)",
        "INSERT INTO windows VALUES (9223372036854775807, 1.0, 9e999), (-9223372036854775807, 1.0, -9e999)",
    ),
}
UNLISTED = {  # such a folder is not a run
    "a file that is a pipe": _file_is_a_pipe,
    "a file that is a link to a device": _file_is_a_link("/dev/zero"),
    "a file that is a link to itself": _file_is_a_link(FILE),
}
