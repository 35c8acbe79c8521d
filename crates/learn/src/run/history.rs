//! Rows of a history with a bound.

/// Rows of a history; of more, every other one is dropped.
pub(super) const MAX_ROWS: usize = 240;

/// Appends a row in place of those that are not `earlier` than it.
pub(super) fn append<T>(rows: &mut Vec<T>, row: T, earlier: impl Fn(&T, &T) -> bool) {
    rows.retain(|other| earlier(other, &row));
    rows.push(row);
    if rows.len() > MAX_ROWS {
        let mut keep = false;
        rows.retain(|_| {
            keep = !keep;
            keep
        });
    }
}
