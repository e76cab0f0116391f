"""Kernel skeletons as jinja templates. Data only: `flexc.codegen.render` reads them."""
