"""Trains a small network on scikit-learn's digits, on CPU ranks.

Run it by `marimo run examples/marimo_digits.py`, or as a script by
`python examples/marimo_digits.py -- --ranks 4`.
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App()


@app.cell
def _():
    import marimo as mo
    import nbdist

    return mo, nbdist


@app.cell
def _(mo, nbdist):
    ranks = int(mo.cli_args().get("ranks", 2))
    cluster = nbdist.Cluster(ranks, device="cpu").start()
    mo.md(f"# Digits on {ranks} ranks")
    return (cluster,)


@app.cell
def _(mo):
    epochs = mo.ui.slider(1, 20, value=5, label="epochs", show_value=True)
    epochs
    return (epochs,)


@app.cell
def _(cluster):
    cluster.monitor(["loss", "accuracy"])
    return


@app.cell
def _(cluster):
    cluster.run_cell(
        """
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import TensorDataset

        pixels, digits = load_digits(return_X_y=True)
        pixels, digits = torch.tensor(pixels / 16).float(), torch.tensor(digits)
        train_x, test_x, train_y, test_y = train_test_split(
            pixels, digits, random_state=0
        )
        data = TensorDataset(train_x, train_y)
        """
    )
    # marimo orders cells by their variables: the training uses this one.
    images = cluster["len(data)"][0]
    return (images,)


@app.cell
def _(cluster, epochs, images):
    print(f"{epochs.value} epochs of {images} images")
    cluster.push(epochs=epochs.value)
    cluster.run_cell(
        """
        # The loader divides the images among the ranks; DDP averages the gradients.
        torch.manual_seed(0)
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        batches = nbdist.loader(data, batch_size=32, shuffle=True, seed=0)
        step = 0
        for epoch in range(epochs):
            for x, y in batches:
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                nbdist.log(loss=loss, step=step)
                step += 1
            with torch.no_grad():
                accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
            nbdist.log(accuracy=accuracy, step=step)
            print(f"epoch {epoch}: {accuracy:.3f} of the test images are right")
        """
    )
    accuracy = cluster["accuracy"][0]
    return (accuracy,)


@app.cell
def _(accuracy, mo):
    print(f"accuracy {accuracy:.3f}")
    mo.md(f"**{accuracy:.1%}** of the test images are right.")
    return


if __name__ == "__main__":
    app.run()
