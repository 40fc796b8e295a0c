"""How fast and how small is a CLIP whose parameters are 8 bits only?

  python -m benchmarks.serving --sizes B/32 --batch_sizes 4
  XLA_FLAGS=--xla_gpu_enable_triton_gemm=false XLA_PYTHON_CLIENT_MEM_FRACTION=0.6 \\
      python -m benchmarks.serving --sizes L/14 H/14 --batch_sizes 256 --open_clip   # a GPU

Times `encode_image` on random pixels for the contenders, in turns: `serving_params` by recipes,
float32, plain Flax in bfloat16 (FlaxBlock) with bfloat16 parameters, and with --open_clip that
package's model in bfloat16 under `torch.compile`. The int8 model computes in bfloat16 on a GPU and
in float32 on a CPU. Adds lines to a JSONL file.
"""

import argparse
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.timing import Contender, append, contender, parser_of, provenance, race
from sbjax.interop.serving import serving_params, size_of
from sbjax.models.clip import CLIP
from sbjax.models.flax_block import FlaxBlock
from sbjax.models.sizes import SIZES, open_clip_name
from sbjax.models.transformer import Block, BlockOptions

RECIPES = ("switchback", "switchback_q")


def main() -> None:
  parser = parser_of(__doc__, "serving")
  parser.add_argument("--sizes", nargs="+", required=True, choices=SIZES)
  parser.add_argument("--batch_sizes", nargs="+", type=int, default=[256, 512, 1024])
  parser.add_argument("--recipes", nargs="+", default=RECIPES)
  parser.add_argument("--float32", action=argparse.BooleanOptionalAction, default=True)
  parser.add_argument("--open_clip", action="store_true", help="too; needs a GPU, torch, open_clip")
  parser.add_argument("--rounds", type=int, default=5)
  args = parser.parse_args()
  for size in args.sizes:
    for batch_size in args.batch_sizes:
      append(args.out, [speed(size, batch_size, args) | provenance()])


def speed(size: str, batch_size: int, args) -> dict:
  """Images a second of each contender."""
  config, on_gpu = SIZES[size], jax.default_backend() == "gpu"
  params = parameters(config)
  dtype = jnp.bfloat16 if on_gpu else jnp.float32
  models = {  # name: parameters, recipe, dtype, block
    **{
      f"serving {recipe}": (serving_params(params, recipe), recipe, dtype, Block)
      for recipe in args.recipes
    },
    **({"full float32": (params, "full", jnp.float32, Block)} if args.float32 else {}),
    "flax bfloat16": (optax.tree.cast(params, jnp.bfloat16), "full", jnp.bfloat16, FlaxBlock),
  }
  side = config.vision.image_size
  image = jax.random.normal(jax.random.key(1), (batch_size, side, side, 3), dtype)
  contenders, found, sizes = {}, {}, {}
  for name, (own, recipe, dtype, block) in models.items():
    sizes[name] = size_of(own)
    options = BlockOptions(recipe=recipe, dtype=dtype, unroll=0 if on_gpu else 1)
    contenders[name] = encoder(CLIP(config, options, block=block), own, image)
  if args.open_clip:
    contenders["open_clip"], sizes["open_clip"] = open_clip_encoder(size, config, image)
  race(list(contenders.values()), rounds=args.rounds)
  for name, one in contenders.items():
    found[name] = {
      "megabytes": round(sizes[name] / 1e6, 1),
      "images_per_second": round(batch_size / one.seconds, 2),
      "spread": one.spread,
    }
    print(f"{size:6} {batch_size:5} {name:22} {found[name]}", flush=True)
  return {
    "benchmark": "serving speed",
    "size": size,
    "batch_size": batch_size,
    "rounds": args.rounds,
    "contenders": found,
    "data": "random parameters and pixels",
  }


def parameters(config):
  """Random parameters; what they are does not change the time."""
  side, length = config.vision.image_size, config.text.context_length
  inputs = jnp.zeros((1, side, side, 3)), jnp.zeros((1, length), jnp.int32)
  shapes = jax.eval_shape(CLIP(config).init, jax.random.key(0), *inputs)["params"]
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: jnp.asarray(0.02 * rng.standard_normal(x.shape, np.float32)), shapes
  )


def encoder(model, params, image):
  """A contender: `encode_image` of one batch."""

  def encode(params, image):
    return model.apply({"params": params}, image, method="encode_image")

  return contender(encode, [(params, image)])


def open_clip_encoder(size, config, image):
  """The same contender of open_clip, compiled, with bfloat16 parameters; and their bytes."""
  import open_clip  # pyright: ignore[reportMissingImports]
  import torch  # pyright: ignore[reportMissingImports]

  os.environ.pop("TRITON_CACHE_DIR", None)  # jax-triton empties it, and PyTorch needs one.
  name = open_clip_name(size)
  model = open_clip.create_model(name, precision="bf16", device="cuda").eval()
  encode = torch.compile(model.encode_image)
  side = config.vision.image_size
  images = torch.randn(image.shape[0], 3, side, side, device="cuda", dtype=torch.bfloat16)
  queued = types.SimpleNamespace(block_until_ready=torch.cuda.synchronize)

  def call(_):
    with torch.inference_mode():
      encode(images)
    return queued

  parameters = sum(p.numel() * p.element_size() for p in model.parameters())
  return Contender(call, [images]), parameters


if __name__ == "__main__":
  main()
