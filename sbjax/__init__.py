"""sbjax: 8-bit training of vision-language models in JAX."""

import sbjax.interop.serialization  # Names our containers to Flax and JAX.
import sbjax.studies.fp4  # noqa: F401  Names its recipes.
from sbjax.attention import attention
from sbjax.convert.quantize_model import quantize_model, quantized_einsum
from sbjax.distributed.exchange import quantized_pmean, quantized_psum, quantized_psum_scatter
from sbjax.distributed.fsdp import gather, gather_weight
from sbjax.linear.dot_general import quantized_dot_general
from sbjax.linear.fused import layer_norm_dense, layer_norm_mlp
from sbjax.linear.layers import (
  LayerNormDense,
  LayerNormMLP,
  LayerScale,
  SwitchBackDense,
  SwitchBackLinear,
)
from sbjax.linear.quantized_dot import quantized_dot
from sbjax.linear.weight import QuantizedWeight, quantize_weight
from sbjax.ops.matmul import scaled_matmul
from sbjax.ops.rows import LayerNormParams
from sbjax.optim.collage import compensated
from sbjax.optim.loss_scale import dynamic_loss_scale, fixed_loss_scale
from sbjax.optim.stable_adamw import scale_by_stable_adam, stable_adamw
from sbjax.optim.state_formats import compress_state
from sbjax.quantize import E4M3, E5M2, INT8, Quantized, Spec, dequantize, quantize
from sbjax.recipes import RECIPES, Recipe, RecipeRules, fp8_cscale

__version__ = "0.1.0"

__all__ = [
  "E4M3",
  "E5M2",
  "INT8",
  "RECIPES",
  "LayerNormDense",
  "LayerNormMLP",
  "LayerNormParams",
  "LayerScale",
  "Quantized",
  "QuantizedWeight",
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
  "fp8_cscale",
  "gather",
  "gather_weight",
  "layer_norm_dense",
  "layer_norm_mlp",
  "quantize",
  "quantize_model",
  "quantize_weight",
  "quantized_dot",
  "quantized_dot_general",
  "quantized_einsum",
  "quantized_pmean",
  "quantized_psum",
  "quantized_psum_scatter",
  "scale_by_stable_adam",
  "scaled_matmul",
  "stable_adamw",
]
