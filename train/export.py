"""Writes a run's model as a folder that open_clip or transformers loads, its tokenizer too.

python -m train.export --workdir=runs/quickstart --format=open_clip

  open_clip.create_model_and_transforms("local-dir:runs/quickstart/open_clip")
  open_clip.get_tokenizer("local-dir:runs/quickstart/open_clip")

With --format=hf, transformers' CLIPModel (SiglipModel), CLIPImageProcessor and AutoTokenizer load
the folder runs/quickstart/hf with from_pretrained. --out=FOLDER writes elsewhere.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

from sbjax.interop.config_files import HF_FILE, OPEN_CLIP_FILE, to_hf, to_open_clip
from sbjax.interop.files import write_file
from sbjax.interop.weights import FORMATS, state_dict, with_end_last
from sbjax.linear.lora import merge_lora
from train.data.preprocessing import IMAGES_FILE, statistics_of
from train.errors import RunError
from train.inference import Model, load
from train.paths import local_path


def export(
  workdir: str | Path,
  format: str,
  out: str | Path | None = None,
  *,
  ema: bool = False,
  step: int | None = None,
) -> Path:
  """Writes the newest checkpoint of a run to a folder, and returns it.

  Args:
    format: "open_clip" or "hf".
    out: the folder; None: workdir/format. Its files are replaced when all are written.
    ema, step: as in `load`: the average of the parameters, and another checkpoint.

  Raises:
    RunError, ValueError: there is no checkpoint, or the format has no place for the model.
  """
  if format not in FORMATS:
    raise ValueError(f"--format={format!r} must be one of {', '.join(FORMATS)}.")
  workdir = local_path(workdir, "--workdir")
  out = workdir / format if out is None else local_path(out, "--out")
  run = load(workdir, ema=ema, step=step)
  if run.task.model.options.is_unit:
    raise ValueError(
      f"{format} has no place for model.parametrization='unit': its blocks compute otherwise."
      " Use the run with train.inference.load, or train with 'standard'."
    )
  run = run._replace(params=merge_lora(run.params))
  files = _open_clip(run) if format == "open_clip" else _hf(run)
  out.mkdir(parents=True, exist_ok=True)
  partial = {name: out / f"partial.{name}" for name in files}
  try:
    for name, contents in files.items():
      if name.endswith(".json"):
        text = json.dumps(contents, indent=2, ensure_ascii=False)
        partial[name].write_text(text, encoding="utf-8")
      else:
        write_file(contents, partial[name])
    for name, path in partial.items():
      os.replace(path, out / name)
  finally:
    for path in partial.values():
      path.unlink(missing_ok=True)
  return out


def _open_clip(run: Model) -> dict:
  """Contents of files by name: objects of JSON, or state dicts."""
  clip, config = run.task.model, run.task.model.config
  model = to_open_clip(
    config,
    layer_scale=clip.options.zero_init_layer_scale,
    logit_bias=clip.init_logit_bias is not None,
  )
  tokenizer, tokenizer_config = run.tokenizer.for_transformers()
  # open_clip takes the tokenizer of the folder where the config names one.
  clean = {"clean": run.tokenizer.cleaning} if run.tokenizer.cleaning else {}
  model["text_cfg"] |= {"hf_tokenizer_name": "tokenizer.json", "tokenizer_kwargs": clean}
  mean, std, _ = statistics_of(config)
  preprocess = {"mean": mean.tolist(), "std": std.tolist(), "interpolation": "bicubic"}
  return {
    OPEN_CLIP_FILE: {"model_cfg": model, "preprocess_cfg": preprocess},
    "open_clip_model.safetensors": state_dict(run.params, config),
    **_tokenizer_files(tokenizer, tokenizer_config, config),
  }


def _hf(run: Model) -> dict:
  config, params = run.task.model.config, run.params
  end_last = config.text.pool == "eot" and config.text.eot_id == 2
  if end_last:  # By 2 transformers means the largest id.
    config, params = with_end_last(config, params)
  if config.vision.pool == "map":  # SiglipModel has a bias, also of a run with the other loss.
    params = {"logit_bias": np.float32(0), **params}
  mean, std, _ = statistics_of(config)
  size = config.vision.image_size
  images = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": size},
    "resample": 3,  # bicubic
    "do_center_crop": True,
    "crop_size": {"height": size, "width": size},
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "image_mean": mean.tolist(),
    "image_std": std.tolist(),
  }
  return {
    HF_FILE: to_hf(config),
    IMAGES_FILE: images,
    "model.safetensors": state_dict(params, config, format="hf"),
    **_tokenizer_files(*run.tokenizer.for_transformers(end_last), config),
  }


def _tokenizer_files(tokenizer: dict, tokenizer_config: dict, config) -> dict:
  length = {"model_max_length": config.text.context_length}
  return {"tokenizer.json": tokenizer, "tokenizer_config.json": {**tokenizer_config, **length}}


def main(arguments=None) -> None:
  summary, _, details = __doc__.partition("\n")
  parser = argparse.ArgumentParser(
    prog="python -m train.export",
    description=summary,
    epilog=details,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--workdir", required=True, help="the folder of the run")
  parser.add_argument("--format", required=True, choices=FORMATS)
  parser.add_argument("--out", help="the folder to write; by default WORKDIR/FORMAT")
  parser.add_argument("--ema", action="store_true", help="the average that optimizer.ema keeps")
  parser.add_argument("--step", type=int, help="of the checkpoint; by default the newest")
  options = parser.parse_args(arguments)
  try:
    out = export(options.workdir, options.format, options.out, ema=options.ema, step=options.step)
  except (RunError, ValueError, ImportError, OSError) as error:
    sys.exit(str(error))
  print(f"Wrote {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


if __name__ == "__main__":
  main()
