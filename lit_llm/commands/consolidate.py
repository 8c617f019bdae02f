"""`python -m lit_llm consolidate`: write a checkpoint, sharded or not, as one file."""

from __future__ import annotations

from pathlib import Path
from typing import IO, cast

import torch

from lit_llm.callbacks._torch import AVERAGE
from lit_llm.checkpoint.adapters import BASE, EMA_HELP, LORA, averaged
from lit_llm.checkpoint.crash_safe import HashingFile
from lit_llm.checkpoint.disk_format import read
from lit_llm.commands.new_output import REPLACE_HELP, new_file
from lit_llm.commands.own_flags import OwnFlags
from lit_llm.core.errors import UserError
from lit_llm.runs.run_folder import expanded
from lit_llm.runs.saved_run import named_checkpoint


def own_flags() -> OwnFlags:
    flags = OwnFlags(
        "consolidate", alone=True, description="Write a checkpoint of any strategy as one file in Lightning's format."
    )
    flags.add_argument("--run", help="run folder, like runs/quickstart")
    flags.add_argument("--ckpt_path", default="last", help="last, best, or a checkpoint's path")
    flags.add_argument("--out", required=True, help="the file to write, like model.ckpt")
    flags.add_argument("--weights", type=bool, help="leave out the optimizer state; enough for generate and --init_from")
    flags.add_argument("--ema", type=bool, help=EMA_HELP)
    flags.add_argument("--replace", type=bool, help=REPLACE_HELP)
    return flags


def main(arguments: list[str]) -> int:
    """Write the file. torch.load, `--resume PATH` and `--ckpt_path PATH` read it. The whole checkpoint must fit in memory."""
    options = own_flags().parse(arguments)
    if options.run is None and options.ckpt_path in ("last", "best"):
        raise UserError(f"'{options.ckpt_path}' needs a run folder (--run runs/NAME, or --ckpt_path PATH)")
    checkpoint = named_checkpoint(Path() if options.run is None else expanded(options.run), options.ckpt_path)
    out = Path(options.out)
    with new_file(out, replace=options.replace) as partial:
        content = read(checkpoint)
        if options.ema:
            content["state_dict"] = averaged(content, checkpoint, "--ema")
            content = {key: value for key, value in content.items() if key != AVERAGE}
        if options.weights:
            content = {key: value for key, value in content.items() if key not in ("optimizer_states", "lr_schedulers")}
        with HashingFile(partial) as file:
            torch.save(content, cast(IO[bytes], file))
    print(f"{out}: {out.stat().st_size / 1e9:.3f} GB, step {content.get('global_step')} of {checkpoint}")
    if options.ema and not options.weights:
        print("note: a run that resumes it continues from the average")
    if LORA in content:
        print(f"note: it holds adapters only; their base weights stay in {content[BASE]['path']} (`export` merges both)")
    return 0
