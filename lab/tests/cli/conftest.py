"""What every test of the command line needs."""

import sklearn.datasets  # noqa: F401 - here, because its import sets environment variables, and tests must not
