"""Work divided among threads: order, one core per thread, errors, and the same logits."""

import threading
import time

import pytest
import torch
from torch import Tensor

import vit
from small_runs import small
from vit.classifier import Classifier
from vit.commands.train import train
from vit.hardware import map_on_cores


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_come_in_the_order_of_the_items(threads):
    def work(number: int) -> int:
        time.sleep(0.01 if number % 3 == 0 else 0)  # so that later items finish first
        return number * number

    assert map_on_cores(work, iter(range(20)), threads) == [n * n for n in range(20)]


def test_only_one_thread_trains_at_a_time(tmp_path, monkeypatch):
    """Both would draw from torch's generator."""
    begun, end = threading.Event(), threading.Event()

    def read(_: object) -> None:
        begun.set()
        end.wait(10)
        raise ValueError("the images are missing")

    monkeypatch.setattr("vit.commands.train.load_data", read)
    errors: list[str] = []

    def run(name: str) -> None:
        try:
            train(small(tmp_path / name))
        except ValueError as error:
            errors.append(str(error))

    first = threading.Thread(target=run, args=["first"])
    first.start()
    assert begun.wait(10)
    run("second")
    end.set()
    first.join()
    run("third")
    missing = "the images are missing"
    assert "another thread" in errors[0] and errors[1:] == [missing, missing]


def test_each_thread_computes_on_one_core_and_the_caller_keeps_its_own():
    together = threading.Barrier(2, timeout=10)  # fails unless both threads work at once

    def work(_: int) -> tuple[str, int]:
        together.wait()
        return threading.current_thread().name, torch.get_num_threads()

    names, cores = zip(*map_on_cores(work, range(2), 2), strict=True)
    assert len(set(names)) == 2 and cores == (1, 1)
    assert torch.get_num_threads() == 2
    alone = map_on_cores(lambda _: (threading.current_thread(), torch.get_num_threads()), [0], 1)
    assert alone == [(threading.current_thread(), 2)]


def test_an_error_ends_the_work_and_reaches_the_caller():
    started = []

    def work(number: int) -> None:
        started.append(number)
        if number == 1:
            raise ValueError("item 1")

    with pytest.raises(ValueError, match="item 1"):
        map_on_cores(work, range(1000), 2)
    assert len(started) < 20
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_logits_do_not_depend_on_the_number_of_cores(precision):
    classifier = vit.load("cifar10_quick", "cpu", precision)
    images = torch.randint(256, (150, 3, 32, 32), dtype=torch.uint8)
    assert classifier.part_size() == 64  # so there are three parts for two threads
    shared = classifier.logits(images)
    assert torch.equal(classifier.forward(classifier.normalize(images)), shared)
    torch.set_num_threads(1)
    assert torch.equal(classifier.logits(images), shared)


def test_few_images_are_one_part_so_that_the_same_ones_get_the_same_logits():
    classifier = vit.load("cifar10_quick", "cpu", "float32")
    assert [classifier.part_size(size) for size in (500, 100, 1)] == [64, 50, 1]
    image = torch.randint(256, (1, 3, 32, 32), dtype=torch.uint8)
    logits = classifier.logits(image.repeat(3, 1, 1, 1))
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("most", [1, 5])
def test_images_are_classified_in_smaller_parts_if_memory_runs_out(most, monkeypatch):
    classifier, sizes = vit.load("cifar10_quick", "cpu"), list[int]()
    images = torch.randint(256, (40, 3, 32, 32), dtype=torch.uint8)
    expected, forward = classifier.logits(images), Classifier._forward

    def limited(self: Classifier, inputs: Tensor) -> Tensor:
        if len(inputs) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        sizes.append(len(inputs))
        return forward(self, inputs)

    monkeypatch.setattr(Classifier, "_forward", limited)
    torch.testing.assert_close(classifier.logits(images), expected)
    assert sum(sizes) == 40 and max(sizes) == most
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        classifier.logits(images)
