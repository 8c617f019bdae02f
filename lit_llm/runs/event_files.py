"""The order in which TensorBoard reads the event files of a run folder."""

from __future__ import annotations

import re
import time
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn


def wait_for_later_name(run_dir: Path) -> None:
    """Wait until an event file made now has a name behind those in the folder: at most two seconds, usually none.

    TensorBoard reads the files of a folder in the order of their names, which begin with the second
    (`events.out.tfevents.1795495981.host.pid.number`). If a run is continued in the second in which it began, the process
    number decides. Read in the wrong order, the first file removes the rows of the second. If the clock is further behind, a
    warning says so.
    """
    names = (re.match(r"events\.out\.tfevents\.(\d+)\.", path.name) for path in run_dir.glob("events.*"))
    ahead = max((int(name[1]) for name in names if name), default=0) + 1 - time.time()
    if ahead > 2:
        rank_zero_warn(
            f"An event file in {run_dir} is {ahead:.0f} s ahead of this machine's clock. TensorBoard reads the files in the "
            "order of their names and may leave out rows; metrics.jsonl has them all. Set the clock."
        )
    elif ahead > 0:
        time.sleep(ahead + 0.01)  # a sleep may end a little early by this clock
