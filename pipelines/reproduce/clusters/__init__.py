"""A real map: dust within 2.5 kpc from open clusters, judged by clusters it has not seen."""
