"""A process that is killed while it saves loses nothing that was saved."""

import json
import sys
from pathlib import Path

import fork_server
import pytest

SCRIPT = Path(__file__).with_name("kill_script.py")


def run(*arguments):
    done = fork_server.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def killed_at_each(tmp_path_factory):
    return run(tmp_path_factory.mktemp("each"))


@pytest.mark.parametrize(
    ("what", "before", "after"),
    [("new", 1, 2), ("again", 1, 2), ("remove", 1, None)],
)
def test_a_kill_before_any_disk_operation_leaves_the_old_or_the_new_checkpoint(what, before, after, killed_at_each):
    seen = killed_at_each[what]
    found = seen["found"]
    turn = found.index(after)
    assert found == [before] * turn + [after] * (len(found) - turn)  # whole, at every moment, and the change is one moment
    assert turn > 0
    # Whatever was left hidden is gone after the next save, which is the newest then.
    assert seen["after"] == [[3, []]] * len(found)
