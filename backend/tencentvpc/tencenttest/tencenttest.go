// SPDX-License-Identifier: Apache-2.0

// Package tencenttest is a server for tests. It speaks the part of Tencent Cloud's API for routes and
// instances, and the protocol of the metadata service. It verifies the signature of each call.
package tencenttest

import (
	"bytes"
	"cmp"
	"encoding/json"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud/access"
	"github.com/flanneld/flanneld/pkg/cloud/access/tc3"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/schema"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
)

// Server is the cloud. It is an http.Handler for the calls of all services.
type Server struct {
	*vpctest.State
	api schema.API
}

// New returns a Server with a table and no instances.
func New() Server {
	state := vpctest.New(func(i vpctest.Instance) string { return i.IPv4().String() }, "CreateRoutes", "ReplaceRoutes", "DeleteRoutes")
	return Server{state, schema.Load("tencent")}
}

// codes returns the code of a failed call, by the error of the call.
func codes() map[error]string {
	return map[error]string{
		vpctest.ErrAway:      "InternalError",
		vpctest.ErrSignature: "AuthFailure.SignatureFailure",
		vpctest.ErrThrottled: "RequestLimitExceeded",
		vpctest.ErrDenied:    "UnauthorizedOperation",
		vpctest.ErrUnknown:   "InvalidAction",
		vpctest.ErrInvalid:   "InvalidParameterValue.Malformed",
		vpctest.ErrNoTable:   "ResourceNotFound",
		vpctest.ErrNoTarget:  "ResourceNotFound",
		vpctest.ErrNoRoute:   "ResourceNotFound",
		vpctest.ErrExists:    "InvalidParameterValue.Duplicate",
		vpctest.ErrUnchanged: "InvalidParameterValue.Duplicate",
		vpctest.ErrQuota:     "LimitExceeded",
	}
}

// object is an object of JSON.
type object = map[string]any

// ServeHTTP implements http.Handler. Errors have the status 200, as in the API.
func (s Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	name := r.Header.Get("X-Tc-Action")
	service := "vpc"
	if name == "DescribeInstances" {
		service = "cvm"
	}

	result, err := s.Answer(vpctest.Call{Name: name}, signed(r, service, body), func(v *vpctest.View) (any, error) {
		if r.Header.Get("X-Tc-Version") != "2017-03-12" || r.Header.Get("X-Tc-Region") != vpctest.Region {
			return nil, vpctest.ErrInvalid
		}
		return answer(v, name, body)
	})
	if problem := s.api.Check(name, schema.JSON(json.RawMessage(body)), schema.JSON(result)); problem != nil {
		err = problem
	}
	if err != nil {
		message := err.Error()
		if err == vpctest.ErrDenied { //nolint:errorlint // not wrapped
			message = "[request id:test]you are not authorized to perform operation (" + service + ":" + name + ")\nresource (qcs::vpc:::rtb/" + vpctest.MainTable + ") has no permission\n"
		}
		result = object{"Error": object{"Code": cmp.Or(codes()[err], "NotInTheDescription"), "Message": message}, "RequestId": "test"}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(object{"Response": result})
}

// signed signs the request again with the keys of the role, and reports in Valid whether the result
// is the same.
func signed(r *http.Request, service string, body []byte) vpctest.Signed {
	seconds, err := strconv.ParseInt(r.Header.Get("X-Tc-Timestamp"), 10, 64)
	if err != nil {
		return vpctest.Signed{}
	}
	again := &http.Request{Header: http.Header{"Content-Type": r.Header["Content-Type"]}, URL: &url.URL{Host: r.Host}}
	at := time.Unix(seconds, 0)
	tc3.Sign(again, access.Keys{ID: vpctest.KeyID, Secret: vpctest.Secret, Token: vpctest.Token}, tc3.Call{Service: service, Time: at, Body: body})
	valid := r.Method == http.MethodPost && r.URL.Path == "/" && r.URL.RawQuery == "" && r.Header.Get("Content-Type") == "application/json; charset=utf-8"
	for _, name := range []string{"Authorization", "X-Tc-Token"} {
		valid = valid && again.Header.Get(name) == r.Header.Get(name)
	}
	return vpctest.Signed{Valid: valid, Time: at}
}

// route is a route in a call.
type route struct {
	ID     int    `json:"RouteId"`
	Item   string `json:"RouteItemId"`
	Dst    string `json:"DestinationCidrBlock"`
	Kind   string `json:"GatewayType"`
	Target string `json:"GatewayId"`

	Description string `json:"RouteDescription"`
	Enabled     bool
}

// change contains the parameters of a call that changes routes.
type change struct {
	Table  string  `json:"RouteTableId"`
	Routes []route `json:"Routes"`
}

func answer(v *vpctest.View, name string, body []byte) (any, error) {
	switch name {
	case "DescribeRouteTables":
		return tables(v, body)
	case "DescribeInstances":
		return instances(v, body)
	case "CreateRoutes", "ReplaceRoutes", "DeleteRoutes":
		return object{"RequestId": "test"}, changeRoute(v, name, body)
	}
	return nil, vpctest.ErrUnknown
}

func changeRoute(v *vpctest.View, name string, body []byte) error {
	var c change
	if strict(body, &c) != nil || len(c.Routes) != 1 {
		return vpctest.ErrInvalid
	}

	r := c.Routes[0]
	is := func(have vpctest.Route) bool { return have.Number == r.ID && (r.Item == "" || r.Item == item(have)) }
	if name == "DeleteRoutes" {
		return v.Delete(c.Table, is)
	}

	dst, err := netip.ParsePrefix(r.Dst)
	if err != nil || !dst.Addr().Is4() || r.Kind != "NORMAL_CVM" {
		return vpctest.ErrInvalid
	}
	if name == "ReplaceRoutes" {
		return v.Replace(c.Table, r.Target, r.Description, is)
	}
	_, err = v.Create(c.Table, dst, r.Target, r.Description)
	return err
}

// strict decodes parameters and refuses unknown ones.
func strict(body []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	return d.Decode(into)
}

func item(r vpctest.Route) string { return "rti-" + strconv.Itoa(r.Number) }

// filter is a filter of a call that describes something.
type filter struct{ Name, Values any }

// inVPC reports whether the only filter is for the VPC.
func inVPC(filters []filter) bool {
	text, err := json.Marshal(filters)
	return err == nil && string(text) == `[{"Name":"vpc-id","Values":["`+vpctest.VPC+`"]}]`
}

func tables(v *vpctest.View, body []byte) (any, error) {
	var params struct {
		Filters       []filter
		Offset, Limit string // strings in this call
	}
	if strict(body, &params) != nil || !inVPC(params.Filters) {
		return nil, vpctest.ErrInvalid
	}

	all := []object{}
	for _, id := range v.Tables() {
		routes, err := v.Visible(id)
		if err != nil {
			return nil, err
		}
		subnets := []object{}
		if subnet := v.SubnetOf(id); subnet != "" {
			subnets = append(subnets, object{"SubnetId": subnet, "RouteTableId": id})
		}
		all = append(all, object{"VpcId": vpctest.VPC, "RouteTableId": id, "Main": id == vpctest.MainTable, "AssociationSet": subnets, "RouteSet": describe(routes)})
	}
	page, _, err := vpctest.Page(v, params.Offset, params.Limit, all)
	return object{"TotalCount": len(all), "RouteTableSet": page, "RequestId": "test"}, err
}

func describe(routes []vpctest.Route) []object {
	all := []object{}
	for _, r := range routes {
		kind := map[vpctest.Kind]string{vpctest.System: "NETD", vpctest.Custom: "USER", vpctest.Learned: "CCN"}[r.Kind]
		gateway := "NORMAL_CVM"
		if _, err := netip.ParseAddr(r.Target); err != nil {
			gateway = "NAT"
		}
		all = append(all, object{
			"RouteId": r.Number, "RouteItemId": item(r), "DestinationCidrBlock": r.Dst.String(), "DestinationIpv6CidrBlock": "",
			"GatewayType": gateway, "GatewayId": r.Target, "RouteType": kind, "Enabled": !r.Disabled, "RouteDescription": r.Description,
		})
	}
	return all
}

func instances(v *vpctest.View, body []byte) (any, error) {
	var params struct {
		Filters       []filter
		Offset, Limit int
	}
	if strict(body, &params) != nil || !inVPC(params.Filters) {
		return nil, vpctest.ErrInvalid
	}

	all := []object{}
	for _, i := range v.Instances() {
		state := "RUNNING"
		if i.Stopped {
			state = "STOPPED"
		}
		all = append(all, object{
			"InstanceId": i.ID, "InstanceState": state, "PrivateIpAddresses": []string{i.IPv4().String()}, "PublicIpAddresses": nil,
			"VirtualPrivateCloud": object{"VpcId": vpctest.VPC, "SubnetId": i.Subnet},
		})
	}
	page, _, err := vpctest.Page(v, strconv.Itoa(params.Offset), strconv.Itoa(params.Limit), all)
	return object{"TotalCount": len(all), "InstanceSet": page, "RequestId": "test"}, err
}

const (
	role = "flanneld"
	mac  = "52:54:00:00:00:01"
)

// Metadata returns the metadata service of an instance.
func Metadata(i vpctest.Instance) http.Handler {
	keys, _ := json.Marshal(object{ //nolint:errchkjson // strings and a number
		"Code": "Success", "TmpSecretId": vpctest.KeyID, "TmpSecretKey": vpctest.Secret, "Token": vpctest.Token,
		"ExpiredTime": time.Now().Add(6 * time.Hour).Unix(), "Expiration": time.Now().Add(6 * time.Hour).UTC().Format(time.RFC3339),
	})

	network := "network/interfaces/macs/" + mac + "/"
	return vpctest.Metadata("", map[string]string{
		"placement/region": vpctest.Region, "instance-id": i.ID, "mac": mac, "cam/security-credentials/{$}": role, "cam/security-credentials/" + role: string(keys),
		"network/interfaces/macs/{$}": mac + "/", network + "vpc-id": vpctest.VPC, network + "subnet-id": i.Subnet,
		network + "primary-local-ipv4": i.IPv4().String(), network + "local-ipv4s/{$}": i.IPv4().String() + "/",
	})
}
