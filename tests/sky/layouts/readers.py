"""The dustmaps package, which warns on import that nobody has configured it."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Configuration file not found")
    from dustmaps.bayestar import BayestarQuery as BayestarQuery
    from dustmaps.edenhofer2023 import Edenhofer2023Query as Edenhofer2023Query
    from dustmaps.leike2020 import Leike2020Query as Leike2020Query
