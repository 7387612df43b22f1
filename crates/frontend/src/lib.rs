//! Front ends: the servers of disks over vhost-user-blk and NBD, with their wire formats. The
//! constants of NBD are those of `fathom_nbd::wire`, which the client uses, too.
//!
//! Read [`vhost_user::Server`] first. The crate must not know layers.

pub mod nbd;

pub mod socket;

pub mod vhost_user;
