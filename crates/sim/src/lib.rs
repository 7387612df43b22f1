//! Seeded clock, faulty back end and models to compare with: for development only.
