"""sbjax: 8-bit training of vision-language models in JAX."""

import sbjax.interop.serialization  # Names our containers to Flax and JAX.
import sbjax.studies.fp4  # noqa: F401  Names its recipes.
from sbjax.attention import attention
from sbjax.convert.quantize_model import quantize_model
from sbjax.convert.quantize_weights import quantize_weights
from sbjax.convert.suggest import suggest_rules
from sbjax.distributed.exchange import quantized_pmean
from sbjax.interop import moved
from sbjax.linear.dot_general import quantized_dot_general
from sbjax.linear.layers import LayerNormDense, LayerNormMLP, SwitchBackDense, SwitchBackLinear
from sbjax.linear.quantized_dot import quantized_dot
from sbjax.ops.matmul import scaled_matmul
from sbjax.optim.collage import compensated
from sbjax.optim.loss_scale import dynamic_loss_scale, fixed_loss_scale
from sbjax.optim.stable_adamw import scale_by_stable_adam, stable_adamw
from sbjax.optim.state_formats import compress_state
from sbjax.quantize import E4M3, E5M2, INT8, Quantized, Spec, dequantize, quantize
from sbjax.recipes import RECIPES, Recipe, RecipeRules

__version__ = "0.1.0"

__all__ = [
  "E4M3",
  "E5M2",
  "INT8",
  "RECIPES",
  "LayerNormDense",
  "LayerNormMLP",
  "Quantized",
  "Recipe",
  "RecipeRules",
  "Spec",
  "SwitchBackDense",
  "SwitchBackLinear",
  "attention",
  "compensated",
  "compress_state",
  "dequantize",
  "dynamic_loss_scale",
  "fixed_loss_scale",
  "quantize",
  "quantize_model",
  "quantize_weights",
  "quantized_dot",
  "quantized_dot_general",
  "quantized_pmean",
  "scale_by_stable_adam",
  "scaled_matmul",
  "stable_adamw",
  "suggest_rules",
]


moved.install()
__getattr__ = moved.attribute
