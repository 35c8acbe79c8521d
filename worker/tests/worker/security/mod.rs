mod tls;
mod tokens;
