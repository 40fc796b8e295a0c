"""What the benchmarks of attention read and print."""

import pytest

from benchmarks import attention, attention_counters, attention_report

NAME = "sbjax_attention_backward_dq_mosaic_gpu_kernel"


def test_counters_are_read_by_kernel_from_what_ncu_prints():
  names = ["ID", "Kernel Name", "Context", *attention_counters.METRICS]
  values = ["0", NAME, "1", *(f"1,{n:03}.5" for n in range(len(names) - 3))]
  lines = [",".join(f'"{x}"' for x in row) for row in (names, [""] * len(names), values)]
  output = "\n".join(["==PROF== Connected", *lines, "==PROF== Disconnected"])
  found = attention_counters.parsed(output)[NAME]
  assert list(found.values()) == [1000.5 + n for n in range(len(attention_counters.METRICS))]
  with pytest.raises(SystemExit, match="no counters:\nno permission"):
    attention_counters.parsed("no permission")


def test_the_last_counters_of_a_kernel_are_in_the_table():
  def row(case, nanoseconds, **more):
    kernels = {NAME: {"gpu__time_duration.sum": nanoseconds} | more}
    return {"case": case, "chip": "NVIDIA H200", "kernels": kernels}

  moved = {f"dram__bytes_{way}.sum": 2e9 for way in ("read", "write")}
  busy = {attention_report.COUNTERS[1]: 49.6}
  rows = [row("a", 3e6), row("b", 4e6, **moved), row("a", 2e6, **busy)]
  assert attention_report.counters_table(rows)[2:] == [
    "| a, backward, dq, H200 | 2.000 |  | 50% |  |  |",
    "| b, backward, dq, H200 | 4.000 |  |  |  | 1.0 TB/s |",
  ]


def test_a_config_is_its_numbers():
  assert attention.config_of("2,1,2,56") == (2, 1, 2, 56)


def test_configs_need_a_gpu_of_mosaic():
  with pytest.raises(SystemExit, match=r"--configs are Mosaic's.* 257 tokens and heads of 64 here"):
    attention.tune(1, 257, 1, 64, False, [(2, 1, 2, 56)])
