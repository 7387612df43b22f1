//! The fathom commands: faces of the control interface.
