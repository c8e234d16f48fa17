"""All tables as data, in the order in which they are run: those that say most about the paper first."""

from experiments.tables.beyond import BEYOND, ROW_PRECISION
from experiments.tables.cifar import CIFAR_10
from experiments.tables.components import COMPONENTS, PARTITION
from experiments.tables.glyphs import GLYPHS
from experiments.tables.gpu import GPU
from experiments.tables.methods import METHODS, SEMI_SUPERVISED, VIEWS
from experiments.tables.over_time import OVER_TIME
from experiments.tables.sampling import CROSS_VALIDATED, DECAY, NEGATIVES
from experiments.tables.windows import LARGER, LENGTHS, TRIALS, WINDOWS

TABLES = {
    table.name: table
    for table in (
        *CIFAR_10,
        GPU,
        NEGATIVES,
        CROSS_VALIDATED,
        LENGTHS,
        WINDOWS,
        COMPONENTS,
        TRIALS,
        VIEWS,
        METHODS,
        LARGER,
        DECAY,
        SEMI_SUPERVISED,
        PARTITION,
        OVER_TIME,
        ROW_PRECISION,
        BEYOND,
        GLYPHS,
    )
}
