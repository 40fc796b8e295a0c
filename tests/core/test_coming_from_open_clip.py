"""What the page for users of open_clip says of our flags."""

import pytest
from absl import flags
from open_clip_flags import our_flags, rows

from train import cli
from train.config import Config, ModelConfig, all_fields
from train.fields import check


@pytest.mark.parametrize("flag", our_flags())
def test_the_program_takes_a_flag_that_the_page_names(flag):
  name, _, value = flag.removeprefix("--").partition("=")
  if not name.startswith("config."):
    assert name in {each.name for each in flags.FLAGS.get_flags_for_module(cli.__name__)}
    return
  path = name.removeprefix("config.")
  assert path in all_fields()
  if value:
    config = Config(model=ModelConfig(size="tiny"))
    cli.override(config, {path: [value]})
    check(path, all_fields()[path], config.get(path))


def test_each_row_has_a_flag_of_ours_or_none():
  assert len(rows()) > 50
  assert [row for row in rows() if row.ours != "none" and not row.ours.startswith("--")] == []
