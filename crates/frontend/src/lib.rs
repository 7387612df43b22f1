//! Front ends: vhost-user-blk and NBD, the only code that knows the wire.
