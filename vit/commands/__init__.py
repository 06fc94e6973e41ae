"""What train.py and each command of eval.py do, one file each."""
