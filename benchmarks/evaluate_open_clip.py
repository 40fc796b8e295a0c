"""Are our zero-shot scores open_clip's, on the same weights and images?

  python -m benchmarks.evaluate_open_clip --cifar10 path/to/cifar10-test.tar.gz \\
      --classes path/to/classnames.txt --flickr8k path/to/flickr8k-test.tar.gz --limit 500

Makes folders as CLIP_benchmark keeps them from the first --limit samples of two sets: CIFAR-10's
test images, and Flickr8k's with their five captions. Scores open_clip's ViT-B-32, with weights that
PyTorch draws, by train.evaluate and by open_clip's own transform, tokenizer, model and
`build_zero_shot_classifier`. Adds a line with both scores to a JSONL file. Needs the extra interop.
"""

import io
import itertools
import json
import tarfile
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.data_open_clip import import_torchvision
from benchmarks.timing import append, parser_of, provenance
from train import inference
from train.data import tar_shards
from train.data.wds_folder import CLASSIFICATION, open_folder
from train.evaluate import evaluate_folder

_TEMPLATES = ("a photo of a {c}.", "a blurry photo of a {c}.", "a photo of the small {c}.")


def main() -> None:
  parser = parser_of(__doc__, "evaluate")
  parser.add_argument("--cifar10", required=True, help="a shard of CIFAR-10's test images")
  parser.add_argument("--classes", required=True, help="a file with its class names")
  parser.add_argument("--flickr8k", required=True, help="a shard of Flickr8k's test images")
  parser.add_argument("--limit", type=int, default=500)
  args = parser.parse_args()
  warnings.simplefilter("ignore")
  import_torchvision()
  import open_clip
  import torch

  torch.manual_seed(0)
  theirs = open_clip.create_model("ViT-B-32").eval()
  with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
    root = Path(temporary)
    torch.save(theirs.state_dict(), root / "drawn.pt")
    ours = inference.load(root / "drawn.pt", size="ViT-B-32", batch_size=50)
    for path in (
      cifar_folder(root, args.cifar10, args.classes, args.limit),
      flickr_folder(root, args.flickr8k, args.limit),
    ):
      folder, started = open_folder(path), time.perf_counter()
      our_scores = evaluate_folder(ours, folder)
      seconds = time.perf_counter() - started
      started = time.perf_counter()
      their_scores = open_clip_scores(open_clip, torch, theirs, folder)
      row = {
        "benchmark": "evaluate",
        "data": f"{folder.name}, the first {args.limit} samples of test",
        "weights": "open_clip's ViT-B-32, drawn by PyTorch with seed 0",
        "ours": our_scores,
        "open_clip": their_scores,
        "largest_difference": max(abs(our_scores[k] - their_scores[k]) for k in their_scores),
        "seconds": {
          "ours": round(seconds, 1),
          "open_clip": round(time.perf_counter() - started, 1),
        },
      }
      print(json.dumps(row, indent=1), flush=True)
      append(args.out, [row | provenance()])


def cifar_folder(root: Path, shard: str, classes: str, limit: int) -> Path:
  folder = root / "wds_cifar10"
  write_shard(folder, itertools.islice(tar_shards.samples(shard, 2**26), limit))
  (folder / "classnames.txt").write_text(Path(classes).read_text())
  (folder / "zeroshot_classification_templates.txt").write_text("\n".join(_TEMPLATES))
  return folder


def flickr_folder(root: Path, shard: str, limit: int) -> Path:
  folder = root / "wds_flickr8k"
  samples = []
  for key, sample in itertools.islice(tar_shards.samples(shard, 2**26), limit):
    captions = "\n".join(json.loads(sample["json"])["captions"])
    samples.append((key, {"jpg": sample["jpg"], "txt": captions.encode()}))
  write_shard(folder, samples)
  (folder / "dataset_type.txt").write_text("retrieval")
  return folder


def write_shard(folder: Path, samples) -> None:
  """One shard of the test split."""
  (folder / "test").mkdir(parents=True)
  (folder / "test" / "nshards.txt").write_text("1")
  with tarfile.open(folder / "test" / "0.tar", "w") as tar:
    for key, sample in samples:
      for extension, content in sample.items():
        info = tarfile.TarInfo(f"{key}.{extension}")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))


def open_clip_scores(open_clip, torch, model, folder) -> dict[str, float]:
  """The scores of the folder by open_clip's own functions."""
  tokenizer, size = open_clip.get_tokenizer("ViT-B-32"), model.visual.image_size
  transform = open_clip.image_transform(size, is_train=False)
  examples = list(folder.examples("test"))
  images = torch.cat(
    [
      model.encode_image(
        torch.stack([transform(Image.open(io.BytesIO(e["image"]))) for e in examples[i : i + 50]]),
        normalize=True,
      )
      for i in range(0, len(examples), 50)
    ]
  )
  if folder.task == CLASSIFICATION:
    classifier = open_clip.build_zero_shot_classifier(
      model, tokenizer, folder.class_names, [t.format for t in folder.templates]
    )
    labels = torch.tensor([example["label"] for example in examples])
    nearest = (100 * images @ classifier).topk(5, dim=1).indices
    right = (nearest[:, 0] == labels).float()
    each = [right[labels == label].mean() for label in labels.unique()]
    return {
      "acc1": float(right.mean()),
      "acc5": float((nearest == labels[:, None]).any(dim=1).float().mean()),
      "mean_per_class_recall": float(torch.stack(each).mean()),
    }
  texts = [text for example in examples for text in example["captions"]]
  owners = torch.tensor(np.repeat(range(len(examples)), [len(e["captions"]) for e in examples]))
  features = [
    model.encode_text(tokenizer(texts[i : i + 100]), normalize=True)
    for i in range(0, len(texts), 100)
  ]
  similarity = torch.cat(features) @ images.T
  scores = {}
  for k in (1, 5, 10):
    hits = similarity.topk(k, dim=1).indices == owners[:, None]
    scores[f"image_retrieval_recall@{k}"] = float(hits.any(dim=1).float().mean())
    hits = owners[similarity.T.topk(k, dim=1).indices] == torch.arange(len(images))[:, None]
    scores[f"text_retrieval_recall@{k}"] = float(hits.any(dim=1).float().mean())
  return scores


if __name__ == "__main__":
  main()
