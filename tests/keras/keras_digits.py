"""The Keras script of Horovod's documentation, for the digits of scikit-learn."""

import tempfile
from pathlib import Path

import nbdist.keras as hvd

hvd.init()

import keras  # noqa: E402
import numpy as np  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = (digits.images[order, :, :, None] / 16).astype("float32")
labels = keras.utils.to_categorical(digits.target[order], 10)
x_train, y_train = images[:1437], labels[:1437]
x_test, y_test = images[1437:], labels[1437:]

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(8, (3, 3), activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
scaled_lr = 0.002 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(scaled_lr))
model.compile(
    loss="categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"]
)
folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(scaled_lr, warmup_epochs=1, verbose=1),
    hvd.callbacks.ModelCheckpoint(folder / f"rank-{hvd.rank()}-{{epoch}}.keras"),
]
history = model.fit(
    x_train[hvd.rank() :: hvd.size()],
    y_train[hvd.rank() :: hvd.size()],
    batch_size=16,
    callbacks=callbacks,
    epochs=4,
    verbose=0,
)
score = model.evaluate(x_test, y_test, verbose=0)
hvd.barrier()
saved = sorted(path.name for path in folder.iterdir())
reloaded = keras.models.load_model(folder / "rank-0-4.keras")
weights = [float(np.abs(weight).sum()) for weight in model.get_weights()]
everybody = hvd.allgather_object(weights)
if hvd.rank() == 0:
    print(f"test accuracy: {score[1]:.2%}")
    print(f"all ranks alike: {all(each == weights for each in everybody)}")
    print(f"saved: {' '.join(saved)}")
