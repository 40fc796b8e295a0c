"""What the page for users of open_clip says of its training program, which is not started here."""

import argparse

import numpy as np
import pytest
from open_clip_flags import PAGE, commands, rows

from train import cli
from train.config import OptimizerConfig
from train.optimizer import learning_rates, make_optimizer, make_schedule
from train.task import make_task

params = pytest.importorskip("open_clip_train.params", reason="needs the `interop` extra")
scheduler = pytest.importorskip("open_clip_train.scheduler", reason="needs the `interop` extra")


@pytest.fixture
def actions(monkeypatch):
  """The flags of the parser that open_clip's program makes."""
  parsers = []

  def parse(parser, *args):
    parsers.append(parser)
    return argparse.Namespace(opt="timm/")  # It then adds no defaults.

  monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
  params.parse_args([])
  (parser,) = parsers
  return [action for action in parser._actions if action.dest != "help"]


def test_the_table_has_each_flag_of_open_clip_once(actions):
  theirs = [flag for action in actions for flag in action.option_strings]
  assert sorted(row.flag for row in rows()) == sorted(theirs)


def test_the_table_has_the_defaults_of_open_clip(actions):
  def described(value):
    if value is None or value in ("", {}):
      return ""
    return "off" if value is False else repr(value).strip("'")

  theirs = {action.option_strings[0]: described(action.default) for action in actions}
  assert {row.flag: row.default for row in rows()} == theirs


def test_the_two_commands_of_the_page_are_the_same_run():
  theirs, ours = commands()
  args = params.parse_args(theirs)
  overrides, (config, _) = cli.split_flags(ours)
  config = cli.load_config(str(PAGE.parents[1] / config.partition("=")[2]))
  cli.override(config, overrides)
  config.check()
  make_task(config)
  make_optimizer(config.optimizer, config.steps)
  optimizer = config.optimizer
  samples = args.epochs * args.train_num_samples
  assert (config.batch_size, config.steps) == (args.batch_size, samples // args.batch_size)
  assert config.eval_every == config.checkpoint_every == config.steps // args.epochs
  assert (optimizer.learning_rate, optimizer.warmup_steps) == (args.lr, args.warmup)
  assert (optimizer.b1, optimizer.b2, optimizer.eps) == (args.beta1, args.beta2, args.eps)
  assert (optimizer.weight_decay, optimizer.clip_norm) == (args.wd, args.grad_clip_norm)
  assert (config.model.size, optimizer.name) == (args.model, args.opt)
  assert (config.seed, config.log_every) == (args.seed, args.log_every_n_steps)


@pytest.mark.parametrize(("warmup", "steps"), [(4, 16), (1, 9)])
@pytest.mark.parametrize("name", ["cosine", "constant", "cooldown"])
def test_learning_rates_are_those_of_open_clip(name, warmup, steps):
  arguments = argparse.Namespace(param_groups=()), 1e-3, warmup, steps
  config = OptimizerConfig(warmup_steps=warmup, schedule="constant" if name != "cosine" else name)
  match name:
    case "cosine":
      theirs = scheduler.cosine_lr(*arguments)
    case "constant":
      theirs = scheduler.const_lr(*arguments)
    case "cooldown":
      theirs = scheduler.const_lr_cooldown(*arguments, cooldown_steps=5)
      config.cooldown_steps = 5
  ours = learning_rates(make_schedule(config, 1e-3, steps))
  np.testing.assert_allclose(
    [ours(step + 1) for step in range(steps)], [theirs(step) for step in range(steps)], rtol=1e-5
  )
