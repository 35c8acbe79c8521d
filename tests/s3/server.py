"""An S3-compatible storage in this process, which refuses what is not signed by its one user.

Prints one line of JSON when it listens: endpoint, accessKeyId, secretAccessKey. Has one bucket, `backups`. Ends with its standard
input. The server is moto; it recomputes each signature (version 4) from the user's secret, by botocore.

    python server.py
"""

import json
import os
import sys

# Requests to set up the user and the bucket; from then on everything is checked.
os.environ["INITIAL_NO_AUTH_ACTION_COUNT"] = "4"

import boto3
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
endpoint = f"http://{host}:{port}"
unchecked = {"endpoint_url": endpoint, "region_name": "us-east-1", "aws_access_key_id": "x", "aws_secret_access_key": "x"}
iam = boto3.client("iam", **unchecked)
iam.create_user(UserName="backup")
rights = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
iam.put_user_policy(UserName="backup", PolicyName="s3", PolicyDocument=json.dumps(rights))
key = iam.create_access_key(UserName="backup")["AccessKey"]
boto3.client("s3", **unchecked).create_bucket(Bucket="backups")
print(
    json.dumps({"endpoint": endpoint, "accessKeyId": key["AccessKeyId"], "secretAccessKey": key["SecretAccessKey"]}),
    flush=True,
)
sys.stdin.read()
server.stop()
