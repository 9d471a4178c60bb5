"""pytest options of the law kit; inert unless used."""
