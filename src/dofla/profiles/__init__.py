"""The features that a teacher's attention needs: Gram matrices, spectra, degrees of freedom, leverage, and theory.

A :class:`~dofla.profiles.profile.Profile` is the first of the four nouns: shapes, spectra and statistics of every head,
as measured. Knows the arithmetic and the feature maps; the measuring itself, which runs a model, is in ``integration``.
"""
