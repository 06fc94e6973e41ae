"""One thread for all tests: the models are tiny, and threads that wait for each other slow them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # commands that tests start inherit it
