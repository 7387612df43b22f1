//! Notifications for the service manager (systemd's `sd_notify` protocol).

use sd_notify::NotifyState;

/// Reports the daemon's `state` to the socket in `NOTIFY_SOCKET`. Does nothing if the variable is
/// not set.
pub(crate) fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "the service manager cannot be notified");
    }
}
