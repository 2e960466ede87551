"""The rotation to Galactic coordinates is astropy's."""

import numpy as np
from astropy import units as u
from astropy.coordinates import SkyCoord

from dustmap.sky.catalogs import galactic_from_icrs


def test_against_skycoord_to_a_billionth_of_a_degree() -> None:
    rng = np.random.default_rng(0)
    pole = SkyCoord(l=np.zeros(3), b=[90.0, -90.0, 0.0], unit="deg", frame="galactic").icrs
    ra = np.concatenate([rng.uniform(0, 360, 5000), pole.ra.deg, [0.0, 360.0, 12.0, 13.0]])
    dec = np.concatenate(
        [np.degrees(np.arcsin(rng.uniform(-1, 1, 5000))), pole.dec.deg, [0.0, 0.0, 90.0, -90.0]]
    )
    l, b = galactic_from_icrs(ra, dec)
    found = SkyCoord(l=l, b=b, unit="deg", frame="galactic")
    expected = SkyCoord(ra=ra, dec=dec, unit="deg").galactic
    assert found.separation(expected).to_value(u.deg).max() < 1e-9
    ordinary = np.abs(b) < 89.0
    np.testing.assert_allclose(b, expected.b.deg, rtol=0, atol=1e-9)
    shift = (l - expected.l.deg + 180.0) % 360.0 - 180.0
    assert np.abs(shift[ordinary]).max() < 1e-9
    assert ((l >= 0.0) & (l < 360.0)).all()
