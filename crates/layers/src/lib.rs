//! Layers between a front end and a back end.
