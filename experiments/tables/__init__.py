"""All tables as data, in the order in which they are run."""

from experiments.tables.cifar import CIFAR_10
from experiments.tables.fashion import FASHION_MNIST
from experiments.tables.gpu import GPU

TABLES = {table.name: table for table in (*CIFAR_10, GPU, *FASHION_MNIST)}
