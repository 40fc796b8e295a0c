"""open_clip's training program with a model from a file: its path, and then the program's flags."""

import sys

from benchmarks.data_open_clip import import_torchvision

if __name__ == "__main__":
  import_torchvision()
  import open_clip
  from open_clip_train.main import main

  open_clip.add_model_config(sys.argv[1])
  main(sys.argv[2:])
