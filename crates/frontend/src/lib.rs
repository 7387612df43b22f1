//! Front ends: vhost-user-blk and NBD, the only code that knows the wire formats.

#![allow(unsafe_code)]

pub mod nbd;

pub mod socket;

pub mod vhost_user;
