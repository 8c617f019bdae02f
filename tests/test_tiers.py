"""What `make test` leaves out has a quick case, in the same file or in one that `QUICK` names."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUICK = {
    "benchmarks/test_scripts.py": "none: imports each script",
    "callbacks/test_ddp_bucket_warmup.py": "none: needs three ranks",
    "callbacks/test_ema_ranks.py": "callbacks/test_ema.py",
    "callbacks/test_lm_eval_tasks.py": "callbacks/test_task_scores.py",
    "callbacks/test_ranks.py": "distributed/test_strategies.py",
    "commands/test_mixture_walk.py": "training/test_source_losses.py",
    "distributed/test_architecture_ranks.py": "distributed/test_strategies.py",
    "distributed/test_context_steps.py": "distributed/test_strategies.py",
    "distributed/test_cross_load.py": "resume/test_elastic.py",
    "distributed/test_dcp_ranks.py": "checkpoint/test_dcp.py",
    "distributed/test_distillation_ranks.py": "models/test_distillation_loss.py",
    "distributed/test_health_ranks.py": "callbacks/test_health.py",
    "distributed/test_histogram_ranks.py": "callbacks/test_histograms.py",
    "distributed/test_initial_weights.py": "distributed/test_strategies.py",
    "distributed/test_latent_attention_ranks.py": "models/test_latent_attention.py",
    "distributed/test_lora_ranks.py": "none: starts its own ranks",
    "distributed/test_muon_on_meshes.py": "distributed/test_strategies.py",
    "distributed/test_pipeline_schedules.py": "distributed/test_strategies.py",
    "distributed/test_predict_ahead_ranks.py": "models/test_predict_ahead.py",
    "distributed/test_rank_memory.py": "plan/test_kept_whole_plan.py",
    "distributed/test_task_scores_ranks.py": "callbacks/test_task_scores.py",
    "hf/test_import_memory.py": "none: writes half a GB",
    "ingest/test_hub.py": "ingest/test_http.py",
    "ingest/test_remote_prepare.py": "ingest/test_http.py",
    "ingest/test_s3.py": "ingest/test_http.py",
    "ingest/test_reader_memory.py": "none: reads files of 100 MB",
    "packaging/test_clashing_names.py": "none: installs a wheel",
    "resume/test_configurations.py": "resume/test_matrix.py",
    "resume/test_mixture_runs.py": "data/test_mixture.py",
    "runs/test_resume_on_ranks.py": "checkpoint/test_shared_verification.py",
    "training/test_sft_run.py": "data/test_chat_files.py",
}
"""File with slow tests only → the quick tests of its claims, or why there are none."""
MARKS = re.compile(r"^pytest\.mark\.(slow|soak)")


def has_quick_tests(file: Path) -> bool:
    body = ast.parse(file.read_text()).body
    whole = [ast.unparse(node.value) for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    tests = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    marks = [[ast.unparse(mark) for mark in test.decorator_list] for test in tests]
    return not any(map(MARKS.match, whole)) and any(not any(map(MARKS.match, names)) for names in marks)


def test_every_file_with_slow_tests_alone_is_in_the_table():
    slow = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.slow" in path.read_text()}
    assert {path.relative_to(ROOT / "tests").as_posix() for path in slow if not has_quick_tests(path)} == QUICK.keys()


def test_the_table_names_a_quick_case_or_says_why_there_is_none():
    for file, case in QUICK.items():
        assert case.startswith("none: ") or all(has_quick_tests(ROOT / "tests" / quick) for quick in case.split()), file
